"""`python -m decode_worker`: how it starts, refuses to start, leaves and dies."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.address import Address
from common.core import Batch
from common.rpc.channels import make_channel
from common.rpc.gen.pdserve.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2
from common.rpc.health import Health
from common.rpc.process import Stop
from common.rpc.security import Security
from common.rpc.server import bind, make_server
from decode_worker.config import Config
from decode_worker.server import SERVICES, add_services, run_worker
from tests.helpers.decode_core import make_req
from tests.helpers.decode_worker import Peers, fake_worker
from tests.helpers.eventually import eventually
from tests.helpers.process import ROOT, Process


@pytest.fixture
def worker(tiny: Path, tmp_path: Path) -> Iterator[Process]:
    process = start(tiny, tmp_path)
    yield process
    if process.is_alive:
        process.kill()


def start(model: Path, folder: Path, *extra: str) -> Process:
    args = ["--model", str(model), "--threads", "1", "--pool-pages", "64", "--page-size", "4", *extra]
    return Process("decode_worker", args, log=folder / "decode.log")


def address(worker: Process) -> str:
    return worker.wait_for_line(r"decode worker ready on (\S+)")[1]


@asynccontextmanager
async def session(channel: grpc.aio.Channel) -> AsyncIterator[Any]:
    call = decode_pb2_grpc.DecodeServiceStub(channel).Session()
    await call.write(decode_pb2.DecodeSessionRequest(hello=prefill_pb2.SessionHello(router_epoch=5)))
    opened = await call.read()
    assert opened.opened.worker_id.startswith("decode-")
    yield call
    call.cancel()


async def serving(channel: grpc.aio.Channel, service: str) -> bool:
    health: Any = health_pb2_grpc.HealthStub(channel)
    response = await health.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)
    return bool(response.status == health_pb2.HealthCheckResponse.SERVING)


async def test_grp_10_a_ready_worker_serves_all_its_services(worker: Process) -> None:
    async with make_channel(address(worker)) as channel:
        for service in ("", *SERVICES):
            assert await serving(channel, service), service


async def test_lif_01_told_to_stop_it_says_so_ends_its_sessions_and_exits_well(worker: Process) -> None:
    async with make_channel(address(worker)) as channel, session(channel) as call:
        worker.signal(signal.SIGTERM)
        assert await call.code() is grpc.StatusCode.UNAVAILABLE
        assert "has left" in await call.details()
    assert worker.wait(within=5) == 0
    assert "Traceback" not in worker.output


def test_a_second_signal_ends_it_at_once(worker: Process) -> None:
    address(worker)
    worker.pause()
    worker.signal(signal.SIGINT)
    worker.signal(signal.SIGTERM)
    worker.resume()
    assert worker.wait(within=5) in (0, 130, 143)


async def test_told_to_stop_while_loading_it_stops(tiny: Path, tmp_path: Path) -> None:
    worker = start(tiny, tmp_path)
    worker.wait_for_line(r"decode worker \S+: model=")
    worker.signal(signal.SIGTERM)
    assert worker.wait(within=15) in (0, -signal.SIGTERM)  # The latter before Python listens to signals.
    assert "Traceback" not in worker.output


async def test_an_unknown_router_is_waited_for_while_the_worker_serves(tiny: Path, tmp_path: Path) -> None:
    worker = start(tiny, tmp_path, "--router", "127.0.0.1:1")
    try:
        async with make_channel(address(worker)) as channel:
            assert await serving(channel, SERVICES[0])
        await eventually(lambda: "no registration with router 127.0.0.1:1" in worker.output, within=5)
    finally:
        worker.signal(signal.SIGTERM)
        assert worker.wait(within=5) == 0


def test_grp_04_a_taken_port_is_one_clear_line(worker: Process, tiny: Path) -> None:
    taken = address(worker)
    done = run("--model", str(tiny), "--pool-pages", "8", "--listen", taken)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == f"error: cannot listen on {taken}: address already in use"


def test_lif_09_a_wrong_model_path_is_one_clear_line(tmp_path: Path) -> None:
    done = run("--model", str(tmp_path / "nowhere"))
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == f"error: model path {tmp_path / 'nowhere'} does not exist"


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (("--lease", "1ms"), "--lease must be at least 100ms, got 0.001s"),
        (("--pool-pages", "0"), "--pool-pages must be at least 1, got 0"),
        (("--listen", "0.0.0.0:0"), "--advertise must be given when --listen is 0.0.0.0:0"),
    ],
    ids=["lease", "pool", "wildcard"],
)
def test_a_flag_that_cannot_work_is_one_clear_line(tiny: Path, flags: tuple[str, ...], text: str) -> None:
    done = run("--model", str(tiny), *flags)
    assert done.returncode == 2
    assert text in done.stderr
    assert len(done.stderr.splitlines()) == 1


async def test_lif_05_when_the_engine_dies_health_says_so_calls_end_and_the_exit_code_is_one(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    def explode(batch: Batch) -> None:
        raise RuntimeError("the model broke")

    worker, runner = fake_worker(before_run=explode)
    config = Config(model=Path("unused"))
    running = asyncio.create_task(run_worker(worker, config, Stop(), security=Security(config)))
    printed: list[str] = []

    def is_ready() -> bool:
        printed.extend(capfd.readouterr().out.split())
        return "ready" in printed

    await eventually(is_ready, within=5)
    address = Address.parse(printed[-1])
    async with make_channel(address) as channel:
        peers = Peers(channel, worker, runner, address)
        router, pairing = await peers.session(), await peers.pair()
        await peers.hand_over(make_req([1, 2, 3]), pairing.pair_id)
        assert await asyncio.wait_for(running, 5) == 1
        assert await router.call.code() is grpc.StatusCode.UNAVAILABLE
        await peers.close()
    assert "the model broke" in caplog.text


async def test_before_the_model_is_loaded_health_answers_and_work_is_refused(tmp_path: Path) -> None:
    worker, runner = fake_worker()
    server = make_server()
    health = Health(server, SERVICES)
    add_services(server, worker)
    bound = await bind(server, Address("127.0.0.1", 0))
    await server.start()
    try:
        async with make_channel(bound) as channel:
            assert await serving(channel, "")
            assert not await serving(channel, SERVICES[0])
            with pytest.raises(grpc.aio.AioRpcError, match="the model is still being loaded"):
                await Peers(channel, worker, runner, bound).pair()
    finally:
        health.shutdown()
        await server.stop(0)


def run(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "decode_worker", *args]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=False)
