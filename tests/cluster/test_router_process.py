"""The router as a process: start, readiness line, signals, and what it does not load."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import psutil
import pytest

from tests.helpers.client import Client, first_event
from tests.helpers.eventually import eventually
from tests.helpers.fake_request import expected_output
from tests.helpers.fake_workers import FakeDecode, FakePrefill
from tests.helpers.process import ROOT, Process, free_port
from tests.helpers.router_stand import compatibility

pytestmark = pytest.mark.cluster

PROMPT = [5, 6, 7, 8, 9]
MAX_RSS = 150 << 20


@contextmanager
def router_process(model: Path, folder: Path, *args: str) -> Iterator[tuple[Process, str]]:
    """A router that listens, without workers."""
    address = f"127.0.0.1:{free_port()}"
    process = Process("router", ["--model", str(model), "--listen", address, *args], log=folder / "router.log")
    try:
        process.wait_for_line("listening on")
        yield process, address
    finally:
        if process.is_alive:
            process.kill()


async def fake_pair(model: Path, address: str) -> tuple[FakePrefill, FakeDecode]:
    prefill = FakePrefill(address, compatibility(model), worker_id="prefill-0")
    decode = FakeDecode(address, compatibility(model), worker_id="decode-0")
    await prefill.start()
    await decode.start()
    return prefill, decode


async def test_it_says_when_it_is_ready_drains_on_sigterm_and_exits_0(tiny: Path, tmp_path: Path) -> None:
    with router_process(tiny, tmp_path) as (process, address):
        assert "router ready" not in process.output
        prefill, decode = await fake_pair(tiny, address)
        await eventually(lambda: f"router ready on {address}" in process.output, within=5)
        decode.steps.seconds = 0.01
        async with Client(address) as client:
            running = asyncio.create_task(client.generate(PROMPT, sampling={"max_tokens": 100, "ignore_eos": True}))
            await eventually(lambda: decode.running, within=3)

            process.signal(signal.SIGTERM)
            await eventually(lambda: "stopping: 1 requests" in process.output, within=3)
            code, message = await client.refusal(PROMPT)

            assert code is grpc.StatusCode.UNAVAILABLE and "shutting down" in message
            assert (await running).ids == expected_output(PROMPT, 100)
        assert await asyncio.to_thread(process.wait, within=5) == 0
        assert "Traceback" not in process.output
        await prefill.close()
        await decode.close()


async def test_a_second_signal_ends_it_at_once_lif_03(tiny: Path, tmp_path: Path) -> None:
    with router_process(tiny, tmp_path) as (process, address):
        prefill, decode = await fake_pair(tiny, address)
        await eventually(lambda: "router ready" in process.output, within=5)
        async with Client(address) as client:
            call = client.call(PROMPT, sampling={"max_tokens": 4000, "ignore_eos": True})
            await first_event(call, "delta")
            process.signal(signal.SIGINT)
            await eventually(lambda: "stopping" in process.output, within=3)
            process.signal(signal.SIGINT)
            assert await asyncio.to_thread(process.wait, within=3) == 130
        await prefill.close()
        await decode.close()


def test_it_loads_no_torch_and_stays_small(tiny: Path, tmp_path: Path) -> None:
    with router_process(tiny, tmp_path) as (process, _):
        memory = psutil.Process(process.pid)
        loaded = {Path(mapped.path).name for mapped in memory.memory_maps()}
        assert not [name for name in loaded if "torch" in name]
        assert memory.memory_info().rss < MAX_RSS


def test_importing_every_room_of_the_router_imports_no_torch() -> None:
    script = (
        "import pathlib, importlib, sys\n"
        "for path in pathlib.Path('router').glob('*.py'):\n"
        "    if path.stem != '__main__': importlib.import_module('router.' + path.stem)\n"
        "bad = [name for name in ('torch', 'transformers', 'numpy') if name in sys.modules]\n"
        "assert not bad, bad\n"
    )
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, timeout=60)


def test_a_taken_port_is_a_clear_error_grp_04(tiny: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        ended = _run("--model", str(tiny), "--listen", address)
    assert ended.returncode == 2
    assert ended.stderr.strip().splitlines()[-1] == f"error: cannot listen on {address}: address already in use"


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (("--model", "/does/not/exist"), "/does/not/exist does not exist"),
        (("--listen", "::1:50051"), "must be host:port"),
        (("--max-queue", "0"), "--max-queue must be at least 1, got 0"),
        ((), "--model is required"),
    ],
)
def test_a_wrong_start_says_what_is_wrong_in_one_line_lif_09(tiny: Path, args: tuple[str, ...], named: str) -> None:
    if args and "--model" not in args:
        args = ("--model", str(tiny), *args)
    ended = _run(*args)
    assert ended.returncode == 2
    assert named in ended.stderr.strip().splitlines()[-1]
    assert "Traceback" not in ended.stderr


def _run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "router", *args], cwd=ROOT, capture_output=True, text=True, timeout=30)


async def test_cancels_and_tiny_deadlines_leave_no_traceback_and_no_work_can_10_can_07(tiny: Path, tmp_path: Path) -> None:
    with router_process(tiny, tmp_path, "--metrics-port", "0") as (process, address):
        prefill, decode = await fake_pair(tiny, address)
        await eventually(lambda: "router ready" in process.output, within=5)
        sampling = {"max_tokens": 2000, "ignore_eos": True}
        async with Client(address) as client:

            async def tiny_deadline(number: int) -> None:
                with pytest.raises(grpc.aio.AioRpcError) as error:
                    await client.generate(PROMPT, sampling=sampling, timeout=0.0005 + number % 10 * 0.0005)
                assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED

            for _ in range(20):
                await asyncio.gather(*(tiny_deadline(number) for number in range(50)))
            for _ in range(50):
                call = client.call(PROMPT, sampling=sampling, request_id="X")
                await first_event(call, "delta")
                call.cancel()
                answer = await client.generate(PROMPT, sampling={"max_tokens": 8, "ignore_eos": True}, request_id="X")
                assert answer.ids == expected_output(PROMPT, 8)
            await eventually(lambda: prefill.is_idle() and decode.is_idle(), within=2)
        assert process.is_alive and "Traceback" not in process.output
        await prefill.close()
        await decode.close()
