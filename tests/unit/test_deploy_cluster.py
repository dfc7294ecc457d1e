"""A local cluster's plan and its processes' ends. The processes are small scripts here, the real ones in tests/cluster."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from common.address import Address
from deploy.child import Child
from deploy.cluster import Cluster
from deploy.cluster_plan import Command, Options, place, plan
from tests.helpers.eventually import eventually

ROOT = Path(__file__).resolve().parents[2]
POLITE = """
import signal, time
signals = []
signal.signal(signal.SIGINT, lambda *_: signals.append(1))
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
print("up", flush=True)
while not signals:
    time.sleep(0.01)
time.sleep(0.3)
print("signals:", len(signals), flush=True)
"""

Script = Callable[[str, str], Command]


@pytest.fixture
def script(tmp_path: Path) -> Script:
    """Makes a Command that runs some code."""

    def make(name: str, code: str) -> Command:
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(code))
        return Command(name, (sys.executable, str(tmp_path / f"{name}.py")))

    return make


def test_without_a_gpu_everything_is_on_the_cpu() -> None:
    assert place("auto", gpus=0, prefill=1, decode=2) == ["cpu", "cpu", "cpu"]
    assert place("cpu", gpus=2, prefill=1, decode=1) == ["cpu", "cpu"]


def test_one_gpu_takes_both_sides_and_two_take_one_each() -> None:
    assert place("auto", gpus=1, prefill=1, decode=1) == ["cuda:0", "cuda:0"]
    assert place("auto", gpus=2, prefill=1, decode=1) == ["cuda:0", "cuda:1"]
    assert place("cuda", gpus=4, prefill=2, decode=2) == ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]


def test_cuda_without_a_gpu_is_left_to_the_engine_to_refuse() -> None:
    assert place("cuda", gpus=0, prefill=1, decode=1) == ["cuda:0", "cuda:0"]


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(ValueError, match="DEVICE must be auto, cpu or cuda, got 'tpu'"):
        place("tpu", gpus=0, prefill=1, decode=1)


def test_without_prefill_workers_the_decode_workers_prefill_themselves() -> None:
    options = Options(model=Path("/m"), router=Address("127.0.0.1", 7), prefill=0, decode=2)
    commands = plan(options, devices=["cpu"] * 2, cores=8)
    assert [command.name for command in commands] == ["router", "decode0", "decode1"]
    assert all("--local-prefill always" in " ".join(command.line) for command in commands[1:])


def test_a_worker_that_does_both_has_its_gpu_for_itself() -> None:
    options = Options(model=Path("/m"), router=Address("127.0.0.1", 7), prefill=0, decode=2)
    for gpus, share in ((2, False), (1, True)):
        devices = place("cuda", gpus=gpus, prefill=0, decode=2)
        lines = [" ".join(command.line) for command in plan(options, devices=devices, cores=8)[1:]]
        assert [("--memory-fraction 0.45" in line, "--memory-fraction" in line) for line in lines] == [(share, share)] * 2


def test_the_plan_is_the_router_then_the_workers_all_told_the_same_model_and_context() -> None:
    options = Options(model=Path("/m"), router=Address("127.0.0.1", 7), prefill=2, decode=1, max_context=512, dtype="bfloat16")
    commands = plan(options, devices=["cpu"] * 3, cores=8)
    assert [command.name for command in commands] == ["router", "prefill0", "prefill1", "decode0"]
    assert [command.line[2] for command in commands] == ["router", "prefill_worker", "prefill_worker", "decode_worker"]
    for command in commands:
        assert " ".join(command.line).count("--model /m") == 1
        assert " ".join(command.line).count("--max-context 512") == 1
    for command in commands[1:]:
        assert "--router 127.0.0.1:7" in " ".join(command.line)
        assert "--dtype bfloat16" in " ".join(command.line)
    assert "--dtype" not in commands[0].line


def options_for(prefill: int, decode: int, **more: Any) -> Options:
    return Options(model=Path("/m"), router=Address("127.0.0.1", 7), prefill=prefill, decode=decode, **more)


def told(command: Command, flag: str) -> str | None:
    return command.line[command.line.index(flag) + 1] if flag in command.line else None


@pytest.mark.parametrize(
    ("devices", "fractions"),
    [
        (["cuda:0", "cuda:1"], [None, None]),
        (["cuda:0", "cuda:0"], ["0.45", "0.45"]),
        (["cuda:0", "cuda:1", "cuda:0"], ["0.45", None, "0.45"]),
        (["cuda:0", "cuda:0", "cuda:0", "cuda:0"], ["0.22"] * 4),
    ],
)
def test_workers_on_one_gpu_share_its_memory(devices: list[str], fractions: list[str | None]) -> None:
    workers = plan(options_for(1, len(devices) - 1), devices=devices, cores=2)[1:]
    assert [told(worker, "--memory-fraction") for worker in workers] == fractions
    assert [told(worker, "--device") for worker in workers] == devices


def test_on_the_cpu_no_memory_fraction_is_given() -> None:
    assert not any("--memory-fraction" in command.line for command in plan(options_for(1, 1), devices=["cpu"] * 2, cores=2))


def test_each_side_is_told_what_is_for_it_and_last_so_that_it_wins() -> None:
    options = options_for(1, 1, prefill_args=("--chunk-tokens", "64"), decode_args=("--memory-fraction", "0.6"))
    router, prefill, decode = plan(options, devices=["cuda:0", "cuda:0"], cores=2)
    assert prefill.line[-2:] == ("--chunk-tokens", "64") and decode.line[-2:] == ("--memory-fraction", "0.6")
    assert "--chunk-tokens" not in (*router.line, *decode.line)


@pytest.mark.parametrize(("cores", "prefill", "decode", "threads"), [(2, 1, 1, 1), (8, 1, 1, 4), (8, 2, 1, 2), (2, 4, 1, 1)])
def test_a_worker_computes_with_its_share_of_the_cores(cores: int, prefill: int, decode: int, threads: int) -> None:
    options = Options(model=Path("/m"), router=Address("127.0.0.1", 7), prefill=prefill, decode=decode)
    commands = plan(options, devices=["cpu"] * (prefill + decode), cores=cores)
    assert {command.threads for command in commands[1:]} == {threads}
    assert commands[0].threads is None


async def test_lif_03_stop_gives_each_process_one_sigint_and_their_good_ends_are_exit_code_0(
    script: Script, capfd: pytest.CaptureFixture[str]
) -> None:
    cluster = Cluster([script("router", POLITE), script("prefill0", POLITE), script("decode0", POLITE)])
    running = asyncio.create_task(cluster.run())
    shown = ""

    def all_up() -> bool:
        nonlocal shown
        shown += capfd.readouterr().out
        return shown.count("| up") == 3

    await eventually(all_up, within=10)
    cluster.stop()
    assert await asyncio.wait_for(running, 10) == 0
    shown += capfd.readouterr().out
    assert shown.count("| signals: 1") == 3


async def test_one_process_that_ends_stops_the_others_and_is_named_with_its_code_and_last_line(
    script: Script, capfd: pytest.CaptureFixture[str]
) -> None:
    broken = "import sys, time; time.sleep(0.3); print('starting'); sys.exit('error: no such model')"
    cluster = Cluster([script("router", POLITE), script("prefill0", POLITE), script("decode0", broken)])
    assert await asyncio.wait_for(cluster.run(), 10) == 1
    out, err = capfd.readouterr()
    assert "error: decode0 ended with exit code 1: error: no such model" in err
    assert out.count("| signals: 1") == 2


async def test_a_second_stop_kills_what_does_not_want_to_end(script: Script, capfd: pytest.CaptureFixture[str]) -> None:
    stubborn = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    cluster = Cluster([script("router", stubborn)])
    running = asyncio.create_task(cluster.run())
    await eventually(lambda: "| up" in capfd.readouterr().out, within=10)
    cluster.stop()
    cluster.stop()
    assert await asyncio.wait_for(running, 10) == 137


def test_a_terminal_that_is_gone_does_not_keep_the_cluster_from_ending() -> None:
    """What SIGHUP asks for would else end in the line that says so."""
    code = f"""
import asyncio, sys
from common.address import Address
from deploy.cluster_plan import Command
from deploy.run_local import _run
commands = [Command(name, (sys.executable, "-c", {POLITE!r})) for name in ("router", "decode0")]
sys.exit(asyncio.run(_run(commands, Address("127.0.0.1", 0))))
"""
    reader, terminal = os.pipe()
    launcher = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=terminal, stderr=terminal)
    os.close(terminal)
    shown = b""
    while shown.count(b"| up") < 2:
        assert (read := os.read(reader, 4096)), shown
        shown += read
    os.close(reader)
    launcher.send_signal(signal.SIGHUP)
    try:
        assert launcher.wait(20) == 0
    finally:
        launcher.kill()


async def test_the_routers_word_that_it_is_ready_is_repeated_with_a_line_to_paste(
    script: Script, capfd: pytest.CaptureFixture[str]
) -> None:
    cluster = Cluster([script("router", "print('router ready on 127.0.0.1:7', flush=True)\n" + POLITE)])
    running = asyncio.create_task(cluster.run())
    shown = ""

    def is_ready() -> bool:
        nonlocal shown
        shown += capfd.readouterr().err
        return "127.0.0.1:7 pdserve.v1.GenerationService/Generate" in shown

    await eventually(is_ready, within=10)
    assert shown.startswith('router ready on 127.0.0.1:7\ntry: grpcurl -plaintext -d \'{"chat":')
    cluster.stop()
    await asyncio.wait_for(running, 10)


async def test_output_is_shown_line_by_line_whatever_is_in_it() -> None:
    lines: list[str] = []
    code = r"import sys; sys.stdout.buffer.write(b'caf\xc3\xa9\n\xff\n' + b'x' * (1 << 21) + b'\nlast')"
    child = await Child.start("odd", [sys.executable, "-c", code], env={}, show=lines.append)
    assert await asyncio.wait_for(child.ended, 10) == 0
    assert lines[:2] == ["café", "\ufffd"]
    assert child.last_line == lines[-1] == "last"


def test_lif_06_a_process_whose_parent_is_killed_is_gone_too() -> None:
    code = """
import asyncio, sys
from deploy.child import Child
async def main():
    child = await Child.start("c", [sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(60)"],
                              env={}, show=lambda text: print(text, flush=True))
    await child.ended
asyncio.run(main())
"""
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    assert psutil.pid_exists(child)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 5
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the orphan lives on"
        time.sleep(0.02)
