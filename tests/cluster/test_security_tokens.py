"""Tokens on every link of a real cluster, and what listens where."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from common.rpc.auth import OPERATOR_METHODS, Audience, audience_of
from common.rpc.gen.pdserve.v1 import generation_pb2 as pb
from common.rpc.gen.pdserve.v1.generation_pb2_grpc import GenerationServiceStub
from tests.cluster.conftest import SMALL
from tests.helpers.calls import rpcs_of, status_of
from tests.helpers.client import Client, first_event, request
from tests.helpers.cluster import Cluster
from tests.helpers.eventually import eventually
from tests.helpers.process import Process
from tests.helpers.prompts import prompt
from tests.helpers.secrets import Secrets, bearer

pytestmark = pytest.mark.cluster

UNAUTHENTICATED, PERMISSION_DENIED = grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED
GENERATION = "pdserve.v1.GenerationService"


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Secrets:
    return Secrets(tmp_path_factory.mktemp("secrets"), tokens=True)


@pytest.fixture(scope="module")
def guarded(tiny: Path, secrets: Secrets, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Tokens everywhere; KV goes by HandoffService, so that this link is used too."""
    with Cluster(
        tmp_path_factory.mktemp("guarded"),
        tiny,
        worker_args=[*SMALL, *secrets.shared_args()],
        prefill_args=["--transport", "grpc"],
        router_args=[
            *secrets.router_args(),
            "--operator-token-file",
            str(secrets.operators),
            "--max-calls-per-client",
            "3",
            "--channelz",
        ],
        connect=secrets.client,
    ) as running:
        yield running


@pytest.fixture
async def client(guarded: Cluster) -> AsyncIterator[Client]:
    async with guarded.client() as connected:
        yield connected
        await guarded.assert_idle(connected)


def address_of(worker: Process) -> str:
    return worker.wait_for_line(r"worker ready on (\S+)")[1]


def addresses(cluster: Cluster) -> dict[str, str]:
    return {"router": cluster.address, "prefill": address_of(cluster.prefill[0]), "decode": address_of(cluster.decode[0])}


async def test_a_cluster_with_tokens_serves_who_has_one(guarded: Cluster, client: Client, secrets: Secrets) -> None:
    answer = await client.generate(prompt(20), sampling={"max_tokens": 6, "ignore_eos": True})
    assert len(answer.ids) == 6
    async with Client("", channel=secrets.connect(guarded.address, tokens=secrets.operators)) as operator:
        assert await operator.flush() >= 0, "the router's unary calls to workers carry its token too"


@pytest.mark.parametrize("role", ["router", "prefill", "decode"])
async def test_no_rpc_but_health_and_reflection_answers_without_a_token(guarded: Cluster, client: Client, role: str) -> None:
    async with grpc.aio.insecure_channel(addresses(guarded)[role]) as channel:
        for rpc in rpcs_of(role):
            wrong = await status_of(channel, rpc, metadata=bearer("a-guess-of-somebody"))
            none = await status_of(channel, rpc)
            if rpc.service.startswith("grpc."):
                assert wrong is none is grpc.StatusCode.OK, rpc.path
            else:
                assert wrong is none is UNAUTHENTICATED, rpc.path


@pytest.mark.parametrize("role", ["router", "prefill", "decode"])
async def test_the_two_kinds_of_token_are_apart(guarded: Cluster, client: Client, secrets: Secrets, role: str) -> None:
    client_token, worker_token = bearer(secrets.client_token), bearer(secrets.worker_token)
    async with grpc.aio.insecure_channel(addresses(guarded)[role]) as channel:
        for rpc in rpcs_of(role):
            as_client = await status_of(channel, rpc, metadata=client_token)
            as_worker = await status_of(channel, rpc, metadata=worker_token)
            if rpc.service.startswith("grpc.") or rpc.path in OPERATOR_METHODS:
                continue
            if rpc.service == GENERATION:
                assert as_worker is PERMISSION_DENIED and as_client not in (PERMISSION_DENIED, UNAUTHENTICATED), rpc.path
            else:
                # A worker does not even know the clients' tokens.
                assert as_client is (PERMISSION_DENIED if role == "router" else UNAUTHENTICATED), rpc.path
                assert as_worker not in (PERMISSION_DENIED, UNAUTHENTICATED), rpc.path
    for process in guarded.processes:
        assert secrets.client_token not in process.output and secrets.worker_token not in process.output


async def test_channelz_is_there_if_asked_for_and_for_workers_tokens_only(
    guarded: Cluster, client: Client, secrets: Secrets
) -> None:
    from grpc_channelz.v1 import channelz_pb2, channelz_pb2_grpc

    async def servers(address: str, token: str) -> grpc.StatusCode:
        async with grpc.aio.insecure_channel(address) as channel:
            call = channelz_pb2_grpc.ChannelzStub(channel).GetServers(
                channelz_pb2.GetServersRequest(), metadata=bearer(token), timeout=5
            )
            code: grpc.StatusCode = await call.code()
            assert code is not grpc.StatusCode.OK or (await call).server
            return code

    assert await servers(guarded.address, secrets.worker_token) is grpc.StatusCode.OK
    assert await servers(guarded.address, secrets.client_token) is PERMISSION_DENIED
    assert await servers(guarded.address, "a-guess-of-somebody") is UNAUTHENTICATED
    assert await servers(addresses(guarded)["decode"], secrets.worker_token) is grpc.StatusCode.UNIMPLEMENTED


async def test_a_worker_without_the_router_s_worker_token_does_not_join_and_says_why(
    guarded: Cluster, client: Client, secrets: Secrets, tiny: Path, tmp_path: Path
) -> None:
    before = set(await client.workers())
    for name, extra in (("none", []), ("client's", ["--worker-token-file", str(secrets.clients)])):
        args = ["--model", str(tiny), "--router", guarded.address, *SMALL, *extra]
        stranger = Process("prefill_worker", args, log=tmp_path / name)
        try:
            line = await asyncio.to_thread(stranger.wait_for_line, "no registration with router .*")
            assert "RegistryService" in line[0] and "token" in line[0]
            assert secrets.client_token not in stranger.output
        finally:
            stranger.kill()
    assert set(await client.workers()) == before


async def test_calls_whose_message_has_not_come_count_for_the_limit(guarded: Cluster, client: Client, secrets: Secrets) -> None:
    get_model = next(rpc for rpc in rpcs_of("router") if rpc.path.endswith("/GetModel"))
    silent: list[Any] = []

    async def is_told(status: grpc.StatusCode) -> bool:
        return await status_of(client.channel, get_model) is status

    async def is_full() -> bool:
        silent.append(client.channel.stream_stream(get_model.path)(timeout=60))  # One that meets our question there is refused.
        return await is_told(grpc.StatusCode.RESOURCE_EXHAUSTED)

    await eventually(is_full, within=3)
    for call in silent:
        call.cancel()
    await eventually(lambda: is_told(grpc.StatusCode.OK), within=3)


async def test_a_client_s_open_calls_are_limited_by_its_token(guarded: Cluster, client: Client, secrets: Secrets) -> None:
    calls = [client.call(prompt(5, seed=i), sampling={"max_tokens": 900, "ignore_eos": True}) for i in range(3)]
    await asyncio.gather(*(call.read() for call in calls))
    code, message = await client.refusal(prompt(5))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "client line 1 has 3 calls open, the limit is 3 (--max-calls-per-client)" in message
    for call in calls:
        call.cancel()
    get_model = next(rpc for rpc in rpcs_of("router") if rpc.path.endswith("/GetModel"))

    async def may_call() -> bool:
        return await status_of(client.channel, get_model) is grpc.StatusCode.OK

    await eventually(may_call, within=3)


async def test_a_client_s_names_and_aborts_are_its_own_and_an_operator_s_are_everybody_s(
    guarded: Cluster, client: Client, secrets: Secrets
) -> None:
    first, second, operator = secrets.client_token, "another-client-0123456789", secrets.operator_token
    secrets.write_tokens(secrets.clients, [first, second])
    try:
        async with grpc.aio.insecure_channel(guarded.address) as channel:
            stub: Any = GenerationServiceStub(channel)
            job = request(prompt(9), sampling={"max_tokens": 1000, "ignore_eos": True}, request_id="job")
            calls = [stub.Generate(job, timeout=30, metadata=bearer(token)) for token in (first, second)]
            await asyncio.gather(*(first_event(call, "delta") for call in calls))

            async def abort(token: str) -> bool:
                found: bool = (await stub.Abort(pb.AbortRequest(request_id="job"), metadata=bearer(token), timeout=5)).found
                return found

            assert await abort(second)
            assert (await first_event(calls[1], "finished")).finished.reason == pb.FINISH_REASON_ABORT
            assert not await abort(second), "the other request of that name is not its own"
            assert await abort(operator)
            assert (await first_event(calls[0], "finished")).finished.reason == pb.FINISH_REASON_ABORT
    finally:
        secrets.write_tokens(secrets.clients, [first])


async def test_what_concerns_everybody_is_for_operators(guarded: Cluster, client: Client, secrets: Secrets) -> None:
    async with grpc.aio.insecure_channel(guarded.address) as channel:
        for rpc in rpcs_of("router"):
            allowed = await status_of(channel, rpc, metadata=bearer(secrets.operator_token))
            if rpc.path in OPERATOR_METHODS:
                for token in (secrets.client_token, secrets.worker_token):
                    assert await status_of(channel, rpc, metadata=bearer(token)) is PERMISSION_DENIED, rpc.path
            workers_only = rpc.path not in OPERATOR_METHODS and audience_of(rpc.path) is Audience.WORKER
            assert (allowed is PERMISSION_DENIED) == workers_only, rpc.path
            assert allowed is not UNAUTHENTICATED, rpc.path
    for process in guarded.processes:
        assert secrets.operator_token not in process.output


async def test_new_tokens_hold_without_a_restart_and_running_calls_go_on(
    guarded: Cluster, client: Client, secrets: Secrets
) -> None:
    old = secrets.client_token
    running = client.call(prompt(9), sampling={"max_tokens": 600, "ignore_eos": True})
    await first_event(running, "delta")
    new = "replaced-" + old
    secrets.write_tokens(secrets.clients, [new])
    try:
        async with grpc.aio.insecure_channel(guarded.address) as channel:
            rpc = next(rpc for rpc in rpcs_of("router") if rpc.path.endswith("/GetModel"))
            assert await status_of(channel, rpc, metadata=bearer(old)) is UNAUTHENTICATED
            assert await status_of(channel, rpc, metadata=bearer(new)) is grpc.StatusCode.OK
        last = await first_event(running, "finished")
        assert last.finished.usage.completion_tokens == 600
    finally:
        secrets.write_tokens(secrets.clients, [old])


@pytest.mark.parametrize("module", ["router", "prefill_worker", "decode_worker"])
def test_another_host_s_door_needs_a_lock_or_an_explicit_no(tiny: Path, tmp_path: Path, module: str) -> None:
    args = ["--model", str(tiny), "--listen", "0.0.0.0:0"]
    args += [] if module == "router" else ["--advertise", "127.0.0.1:1"]
    process = Process(module, args, log=tmp_path / "log")
    assert process.wait(within=20) == 2
    clients = "clients' tokens (--auth-token-file) or certificates (--tls-ca), and " if module == "router" else ""
    missing = f"TLS (--tls-cert and --tls-key), and {clients}workers' tokens (--worker-token-file) or certificates (--tls-ca)"
    assert process.output == (
        f"python -m {module}: error: --listen 0.0.0.0:0 is reached from other hosts: it needs {missing}, or --insecure "
        "(see --help)\n"
    )


def test_a_worker_s_token_does_not_travel_readable_to_another_host(tiny: Path, tmp_path: Path, secrets: Secrets) -> None:
    args = ["--model", str(tiny), "--router", "192.0.2.1:5", *secrets.shared_args()]
    process = Process("prefill_worker", args, log=tmp_path / "log")
    assert process.wait(within=20) == 2
    assert process.output == (
        "python -m prefill_worker: error: --router 192.0.2.1:5 is not on this host: it needs TLS (--tls-cert and --tls-key), or "
        "--insecure (see --help)\n"
    )


async def test_insecure_opens_it(tiny: Path, tmp_path: Path) -> None:
    process = Process("router", ["--model", str(tiny), "--listen", "0.0.0.0:0", "--insecure"], log=tmp_path / "log")
    try:
        await asyncio.to_thread(process.wait_for_line, "listening on 0.0.0.0:")
        assert "without TLS" in process.output
    finally:
        process.kill()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--auth-token-file", "/no/such/file"], "error: --auth-token-file /no/such/file does not exist"),
        (["--worker-token-file", "/dev/null"], "error: --worker-token-file /dev/null has no token in it"),
        (["--tls-cert", "/c"], "python -m router: error: --tls-key must be given with --tls-cert (see --help)"),
        (["--tls-cert", "/c", "--tls-key", "/k"], "error: --tls-cert /c does not exist"),
        (["--tls-ca", "/c"], "python -m router: error: --tls-cert and --tls-key must be given with --tls-ca (see --help)"),
        (["--max-message-mb", "4"], "python -m router: error: --max-message-mb must be in [5, 1024], got 4 (see --help)"),
        (["--max-calls-per-client", "0"], "error: --max-calls-per-client must be at least 1, got 0 (see --help)"),
    ],
)
def test_a_file_or_flag_that_cannot_work_is_one_line_and_exit_code_2(
    tiny: Path, tmp_path: Path, args: list[str], message: str
) -> None:
    process = Process("router", ["--model", str(tiny), "--listen", "127.0.0.1:0", *args], log=tmp_path / "log")
    assert process.wait(within=20) == 2
    assert process.output.strip().splitlines()[-1].endswith(message) and "Traceback" not in process.output
