"""How a process begins and ends, in a real process."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WAITING = """
async def main(stop):
    print("up", flush=True)
    await stop.requested.wait()
    print("draining", flush=True)
    await asyncio.sleep({drain})
    return 0
"""


def start(body: str) -> subprocess.Popen[str]:
    code = "import asyncio\nfrom common.errors import StartError\nfrom common.rpc.process import run_process\n" + textwrap.dedent(
        body
    )
    return subprocess.Popen(
        [sys.executable, "-c", code + "\nrun_process(main)"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_main_to_stop_and_its_value_is_the_exit_code(number: signal.Signals) -> None:
    process = start(WAITING.format(drain=0))
    assert line(process) == "up"
    process.send_signal(number)
    out, err = process.communicate(timeout=10)
    assert (process.returncode, out, err) == (0, "draining\n", "")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_lif_03_the_second_signal_ends_the_process_at_once(number: signal.Signals, code: int) -> None:
    process = start(WAITING.format(drain=60))
    assert line(process) == "up"
    process.send_signal(number)
    assert line(process) == "draining"
    process.send_signal(number)
    process.communicate(timeout=10)
    assert process.returncode == code


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_while_it_only_starts_a_signal_ends_it_at_once_whatever_its_threads_do(number: signal.Signals, tmp_path: Path) -> None:
    process = start(
        f"""
        import time
        from common.address import Address

        async def main(stop):
            path = "{tmp_path}/socket"
            open(path, "w").close()
            with stop.at_once(Address.parse("unix:" + path)):
                print("loading", flush=True)
                await asyncio.to_thread(time.sleep, 60)
            return 1
        """
    )
    assert line(process) == "loading"
    process.send_signal(number)
    process.communicate(timeout=10)
    assert process.returncode == 0 and not list(tmp_path.iterdir())


def test_a_hangup_is_a_wish_to_stop_unless_it_was_to_be_ignored() -> None:
    process = start(WAITING.format(drain=0))
    assert line(process) == "up"
    process.send_signal(signal.SIGHUP)
    out, _ = process.communicate(timeout=10)
    assert (process.returncode, out) == (0, "draining\n")
    process = start("import signal\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)  # As nohup does.\n" + WAITING.format(drain=0))
    assert line(process) == "up"
    process.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=10)
    assert (process.returncode, out) == (0, "draining\n")


def test_a_start_error_is_one_line_and_exit_code_2() -> None:
    process = start("async def main(stop):\n    raise StartError('cannot listen on 127.0.0.1:1: address already in use')")
    _, err = process.communicate(timeout=10)
    assert (process.returncode, err) == (2, "error: cannot listen on 127.0.0.1:1: address already in use\n")


def test_a_start_error_inside_a_task_group_is_one_line_too() -> None:
    process = start(
        """
        async def fail():
            raise StartError("no model at /m")

        async def main(stop):
            async with asyncio.TaskGroup() as group:
                group.create_task(fail())
                group.create_task(asyncio.sleep(60))
        """
    )
    _, err = process.communicate(timeout=10)
    assert (process.returncode, err) == (2, "error: no model at /m\n")


def test_any_other_error_shows_its_traceback_and_exits_1() -> None:
    process = start("async def main(stop):\n    raise RuntimeError('boom')")
    _, err = process.communicate(timeout=10)
    assert process.returncode == 1
    assert err.startswith("Traceback")
    assert err.endswith("RuntimeError: boom\n")
