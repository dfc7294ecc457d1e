"""ProcessEngine: what only an engine in a process of its own has to keep."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import tempfile
import time
from typing import Any

import psutil
import pytest
import torch

from common import logs
from common.core import Req, SamplingParams
from common.descriptor import Descriptor
from common.engine.parcel import Unpacker, pack
from common.engine.process import EngineDied, ProcessEngine
from common.errors import Unavailable
from common.handoff.cuda_ipc import PoolExport
from common.handoff.pool_memory import PoolMemory
from common.work import Compatibility, FinishReason, TokenOut
from common.work_key import WorkKey
from decode_worker.description import DecodeDescription
from decode_worker.events import StepTokens
from prefill_worker.commands import AwaitPoolEnd, OpenCudaPool
from tests.helpers.echo_core import EchoCore, News, build_slowly
from tests.helpers.eventually import eventually


async def started(events: list[Any] | None = None) -> tuple[ProcessEngine, psutil.Process]:
    engine = ProcessEngine(EchoCore, on_event=(events if events is not None else []).append)
    await engine.start()
    return engine, psutil.Process(await engine.call("pid"))


async def test_the_core_runs_in_a_child_that_is_gone_after_close() -> None:
    engine, child = await started()
    assert child.ppid() == os.getpid()
    await engine.close()
    assert not psutil.pid_exists(child.pid)  # Not even a zombie.


async def test_a_killed_child_is_told_at_once_with_its_signal() -> None:
    engine, child = await started()
    waiting = asyncio.ensure_future(engine.call(("never", 0)))
    await asyncio.sleep(0)
    killed = time.monotonic()
    child.kill()
    died = await engine.died
    assert time.monotonic() - killed < 2
    assert isinstance(died, EngineDied) and str(died) == "the engine process was killed by SIGKILL"
    with pytest.raises(Unavailable):
        await waiting
    engine.post("nobody is there")
    await engine.close()
    assert not psutil.pid_exists(child.pid)


async def test_what_was_said_before_the_death_is_heard() -> None:
    events: list[Any] = []
    engine, _ = await started(events)
    engine.post(("say and die", 50))
    assert isinstance(await engine.died, EngineDied)
    assert len(events) == 50
    await engine.close()


async def test_signals_to_stop_are_not_the_engine_s_business() -> None:
    engine, child = await started()
    for number in (signal.SIGINT, signal.SIGTERM):
        child.send_signal(number)
    assert await engine.call("still here") == "still here"
    await engine.close()


async def test_an_engine_still_being_built_is_ended_at_once() -> None:
    engine = ProcessEngine(build_slowly, on_event=lambda event: None)
    starting = asyncio.ensure_future(engine.start())
    await asyncio.sleep(0.1)
    starting.cancel()
    begun = time.monotonic()
    await engine.close()
    assert time.monotonic() - begun < 2 and engine.died.result() is None


async def test_urgent_events_do_not_wait_for_the_end_of_their_step() -> None:
    arrivals: list[tuple[float, Any]] = []
    engine = ProcessEngine(EchoCore, on_event=lambda event: arrivals.append((time.monotonic(), event)))
    await engine.start()
    engine.post(("slow steps", 1, 0.2))
    await eventually(lambda: len(arrivals) == 2, within=2)
    (first, news), (second, step) = arrivals
    assert isinstance(news, News) and step == ("step", 1) and second - first > 0.1
    await engine.close()


async def test_a_descriptor_arrives_as_a_copy_that_is_closed_after_use() -> None:
    engine, _ = await started()
    with tempfile.TemporaryFile() as file:
        file.write(b"shared")
        file.flush()
        before = await engine.call(("descriptors",))
        for _ in range(5):
            call = asyncio.ensure_future(engine.call(("read", Descriptor(file.fileno()))))
            assert await call == b"shared"
        assert await engine.call(("descriptors",)) <= before + 1  # The last one may be on its way out.
    await engine.close()


async def test_more_than_the_socket_holds_goes_both_ways_in_order() -> None:
    engine, _ = await started()
    big = [bytes([i]) * 3_000_000 for i in range(4)]
    assert await asyncio.gather(*map(engine.call, big)) == big
    await engine.close()


async def test_log_lines_of_the_engine_look_like_the_worker_s(capfd: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    logs.configure("decode", "info")
    try:
        engine, _ = await started()
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
    await engine.call(("log", "hello from there"))
    await engine.close()
    assert "WARNING decode engine  hello from there\n" in capfd.readouterr().err


async def test_a_killed_parent_takes_its_engine_along() -> None:
    code = (
        "import asyncio\n"
        "from common.engine.process import ProcessEngine\n"
        "from tests.helpers.echo_core import EchoCore\n"
        "async def main():\n"
        "    engine = ProcessEngine(EchoCore, on_event=print)\n"
        "    await engine.start()\n"
        "    engine.post(('slow steps', 1, 60.0))\n"
        "    print(await engine.call('pid') if False else engine._process.pid, flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)
    assert parent.stdout is not None
    child = psutil.Process(int(await parent.stdout.readline()))
    parent.kill()
    await parent.wait()
    await eventually(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, within=1)


def unpacked(value: Any) -> Any:
    (same,) = Unpacker().feed(pack([value]).data)
    return same


def test_a_request_crosses_whole_and_quickly() -> None:
    ids = torch.arange(32_768, dtype=torch.int32)
    req = Req(ids, -1, 0, 8, 5, SamplingParams(seed=3, logit_bias={4: 1.0}), None, router_epoch=9, n=2, request_id="é")
    req.take_chunk(100)
    times = []
    for _ in range(20):
        begun = time.perf_counter()
        copy = unpacked(req)
        times.append(time.perf_counter() - begun)
    assert torch.equal(copy.input_ids, ids)
    assert {**vars(copy), "input_ids": 0} == {**vars(req), "input_ids": 0}
    assert min(times) < 0.001, f"{min(times) * 1e6:.0f} us"


def test_step_tokens_cross_whole() -> None:
    key = WorkKey(7, 1, 2)
    tokens = (TokenOut(key, 0, 5, -0.5, ((5, -0.5),), None, 16), TokenOut(key, 1, 6, finish=FinishReason.STOP))
    copy = unpacked(StepTokens(7, tokens))
    assert copy == StepTokens(7, tokens) and copy.tokens[1].finish is FinishReason.STOP
    assert isinstance(copy.tokens[0], TokenOut) and isinstance(copy.tokens[0].key, WorkKey)


def test_what_cuda_ipc_says_across_the_seam_crosses_whole() -> None:
    export = PoolExport(bytes(range(64)), 512, 1 << 40, bytes(16), nonce=bytes(range(32)), nonce_offset=(1 << 40) + 512)
    compatibility = Compatibility("model", "bfloat16", 64, 8192, num_layers=32, num_kv_heads=8, head_dim=128)
    for value in (
        DecodeDescription(compatibility, 10, 1 << 23, export),
        OpenCudaPool("pair", export, "socket", 1 << 23),
        AwaitPoolEnd("pair"),
    ):
        assert unpacked(value) == value


def test_the_pool_s_memory_is_the_same_on_the_other_side() -> None:
    memory = PoolMemory(2, 8)
    parcel = pack([memory])
    (copy,) = Unpacker().feed(parcel.data, [os.dup(fd) for fd in parcel.descriptors])
    copy.page_view(1)[:] = b"12345678"
    assert bytes(memory.view) == bytes(8) + b"12345678"
