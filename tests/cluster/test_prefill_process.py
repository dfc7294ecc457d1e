"""The prefill worker as a process: start, readiness, refusals, and its staged end."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.rpc.channels import make_channel
from common.rpc.gen.pdserve.v1 import prefill_pb2, prefill_pb2_grpc
from common.wire import req_to_pb
from tests.helpers.eventually import eventually
from tests.helpers.prefill_core import EPOCH, make_req
from tests.helpers.process import Process, free_port

pytestmark = pytest.mark.cluster
SMALL = ("--page-size", "4", "--pool-pages", "64", "--max-context", "256", "--threads", "1")
READY = r"^prefill worker ready on (.+)$"
Request = prefill_pb2.PrefillSessionRequest
Start = Callable[..., Process]


@pytest.fixture
def start(tiny: Path, tmp_path: Path) -> Iterator[Start]:
    """Starts prefill workers of the tiny model; those left at the end are killed."""
    started: list[Process] = []

    def begin(*args: str, model: Path = tiny) -> Process:
        log = tmp_path / f"prefill-{len(started)}.log"
        started.append(Process("prefill_worker", ["--model", str(model), *SMALL, *args], log=log))
        return started[-1]

    yield begin
    for process in started:
        if process.is_alive:
            process.kill()


@asynccontextmanager
async def session(address: str) -> AsyncIterator[Any]:
    """An open session without a decode worker: single-token requests only."""
    async with make_channel(address) as channel:
        call = prefill_pb2_grpc.PrefillServiceStub(channel).Session()
        await call.write(Request(hello=prefill_pb2.SessionHello(router_epoch=EPOCH)))
        assert (await asyncio.wait_for(call.read(), 5)).opened.worker_id.startswith("prefill-")
        yield call


async def submit(call: Any, length: int, *, uid: int = 1, **fields: Any) -> None:
    ids = [(uid + i) % 200 for i in range(length)]
    pb = prefill_pb2.Submit(req=req_to_pb(make_req(ids, uid=uid, **({"output_len": 1} | fields))))
    if pb.req.output_len > 1:
        pb.decode_address, pb.decode_worker = "127.0.0.1:1", "decode-nobody"
    await call.write(Request(submit=pb))


async def health_of(address: str, service: str) -> Any:
    async with make_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        return (await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=2)).status


async def test_it_is_alive_before_it_is_ready_and_serves_when_it_says_so_GRP_10(start: Start) -> None:
    port = free_port()
    process = start("--listen", f"127.0.0.1:{port}")
    address = f"127.0.0.1:{port}"

    async def alive() -> bool:
        try:
            return bool(await health_of(address, "") == health_pb2.HealthCheckResponse.SERVING)
        except grpc.aio.AioRpcError:
            return False

    await eventually(alive, within=20)
    early = await health_of(address, "pdserve.v1.PrefillService")
    assert early in (health_pb2.HealthCheckResponse.NOT_SERVING, health_pb2.HealthCheckResponse.SERVING)
    assert await asyncio.to_thread(process.wait_for_line, READY)
    assert await health_of(address, "pdserve.v1.PrefillService") == health_pb2.HealthCheckResponse.SERVING
    async with session(address) as call:
        await submit(call, 30)
        kinds = [(await asyncio.wait_for(call.read(), 5)).WhichOneof("message") for _ in range(2)]
        assert kinds == ["started", "first_token"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_first_signal_drains_and_ends_with_0(start: Start, number: int) -> None:
    process = start()
    address = (await asyncio.to_thread(process.wait_for_line, READY)).group(1)
    async with session(address) as call:
        process.signal(number)
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await asyncio.wait_for(call.read(), 5)
        assert ended.value.code() is grpc.StatusCode.UNAVAILABLE and "has left" in (ended.value.details() or "")
    assert await asyncio.to_thread(process.wait, within=5) == 0
    assert "Traceback" not in process.output


async def test_work_under_way_is_finished_within_the_grace_and_new_work_refused_FLT_06(start: Start) -> None:
    process = start("--grace", "20s", "--chunk-tokens", "1")
    address = (await asyncio.to_thread(process.wait_for_line, READY)).group(1)
    async with session(address) as call:
        await submit(call, 200)
        assert (await asyncio.wait_for(call.read(), 5)).HasField("started")
        process.signal(signal.SIGTERM)
        await asyncio.to_thread(process.wait_for_line, "draining")
        await submit(call, 5, uid=2)
        messages = [await asyncio.wait_for(call.read(), 15) for _ in range(2)]
        (refused,) = [m.failure for m in messages if m.HasField("failure")]
        assert refused.uid == 2 and refused.retryable and "draining" in refused.message
        assert [m.first_token.uid for m in messages if m.HasField("first_token")] == [1]
    assert await asyncio.to_thread(process.wait, within=10) == 0


async def test_what_the_grace_does_not_do_for_is_handed_back(start: Start) -> None:
    process = start("--grace", "0s", "--chunk-tokens", "1")
    address = (await asyncio.to_thread(process.wait_for_line, READY)).group(1)
    async with session(address) as call:
        for uid in range(20):
            await submit(call, 250, uid=uid)
        assert (await asyncio.wait_for(call.read(), 5)).HasField("started")
        process.signal(signal.SIGTERM)
        failures = {}
        try:
            while (message := await asyncio.wait_for(call.read(), 10)) is not grpc.aio.EOF:
                if message.HasField("failure"):
                    failures[message.failure.uid] = message.failure
        except grpc.aio.AioRpcError:
            pass
    assert failures and all(f.retryable for f in failures.values())
    # A submission that came after the signal is refused, one that came before it is ended.
    assert all(f.handed_back and ("leaving" in f.message or "draining" in f.message) for f in failures.values())
    assert any("leaving" in f.message for f in failures.values())
    assert await asyncio.to_thread(process.wait, within=10) == 0


async def test_a_second_signal_ends_it_at_once(start: Start) -> None:
    process = start("--grace", "60s", "--chunk-tokens", "1")
    address = (await asyncio.to_thread(process.wait_for_line, READY)).group(1)
    async with session(address) as call:
        for uid in range(20):
            await submit(call, 250, uid=uid)
        assert (await asyncio.wait_for(call.read(), 5)).HasField("started")
        process.signal(signal.SIGTERM)
        await asyncio.to_thread(process.wait_for_line, "draining")
        process.signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, within=2) == 128 + signal.SIGTERM


async def test_a_signal_while_the_model_is_loading_ends_it_with_0(start: Start) -> None:
    process = start()
    await asyncio.to_thread(process.wait_for_line, "listening on")
    process.signal(signal.SIGTERM)
    assert await asyncio.to_thread(process.wait, within=20) == 0


def test_a_taken_port_is_one_clear_line_and_code_2_GRP_04(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = start("--listen", f"127.0.0.1:{port}")
        assert process.wait(within=20) == 2
    assert f"error: cannot listen on 127.0.0.1:{port}: address already in use" in process.output
    assert "Traceback" not in process.output


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (("--pool-pages", "0"), "--pool-pages must be at least 1, got 0"),
        (("--transport", "carrier-pigeon"), "must be one of auto, cuda_ipc, shm, grpc"),
        (("--listen", "0.0.0.0:0"), "--advertise must be given when --listen is 0.0.0.0:0"),
        (("--transfer-timeout", "0s"), "--transfer-timeout must be more than 0"),
    ],
)
def test_a_setting_that_cannot_work_is_one_clear_line_and_code_2(start: Start, args: tuple[str, ...], text: str) -> None:
    process = start(*args)
    assert process.wait(within=20) == 2
    assert text in process.output and "Traceback" not in process.output


def test_a_model_path_that_is_not_there_is_one_clear_line_and_code_2(start: Start, tmp_path: Path) -> None:
    process = start(model=tmp_path / "nowhere")
    assert process.wait(within=20) == 2
    assert "does not exist" in process.output and "Traceback" not in process.output


def test_a_pool_too_small_for_one_page_is_refused(start: Start, tiny: Path, tmp_path: Path) -> None:
    args = ["--model", str(tiny), "--page-size", "1000000", "--pool-memory-mb", "1"]
    process = Process("prefill_worker", args, log=tmp_path / "small.log")
    assert process.wait(within=20) == 2
    assert "must hold at least one page" in process.output


async def test_an_engine_that_dies_ends_the_process_with_1_and_its_sessions_with_a_status_GRP_02(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import prefill_worker.core as core\n"
        "def step(self):\n    raise RuntimeError('the device is gone')\n"
        "core.PrefillCore.step = step\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parents[2]}")
    process = start()
    address = (await asyncio.to_thread(process.wait_for_line, READY)).group(1)
    async with session(address) as call:
        await submit(call, 10)
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            while True:
                await asyncio.wait_for(call.read(), 5)
        assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
    assert await asyncio.to_thread(process.wait, within=5) == 1
    assert "the engine has died" in process.output and "the device is gone" in process.output


async def test_pages_and_load_are_on_the_metrics_port(start: Start) -> None:
    process = start("--metrics-port", "0")
    address = (await asyncio.to_thread(process.wait_for_line, READY)).group(1)
    port = process.wait_for_line(r"metrics on 127.0.0.1:(\d+)").group(1)
    async with session(address) as call:
        await submit(call, 10)
        assert [(await asyncio.wait_for(call.read(), 5)).WhichOneof("message") for _ in range(2)] == ["started", "first_token"]

        async def counted() -> bool:
            text = await asyncio.to_thread(lambda: urlopen(f"http://127.0.0.1:{port}/metrics", timeout=2).read().decode())
            lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("pdserve_"))
            wanted = {
                'pdserve_pages{kind="free"}': "62.0",
                'pdserve_pages{kind="cached"}': "2.0",
                'pdserve_pages{kind="held"}': "0.0",
                "pdserve_pool_pages": "64.0",
                "pdserve_running_requests": "0.0",
                "pdserve_prefill_tokens_total": "10.0",
            }
            assert {name: lines.get(name) for name in wanted} == wanted
            return True

        await eventually(counted, within=3)
