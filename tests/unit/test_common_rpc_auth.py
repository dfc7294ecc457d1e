"""Who may call what: the gate's rules, and the interceptor over real servers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from common.address import Address
from common.errors import PermissionDenied, ResourceExhausted, Unauthenticated
from common.rpc.auth import (
    AUDIENCES,
    NOBODY_KNOWN,
    OPERATOR_METHODS,
    Audience,
    AuthInterceptor,
    Gate,
    audience_of,
    who_calls,
)
from common.rpc.call_limit import CallLimit
from common.rpc.channels import make_channel
from common.rpc.peer import host_of, is_local_peer
from common.rpc.server import bind, make_server
from common.rpc.tokens import TokenFile
from tests.helpers.calls import ROLES, Rpc, rpcs, services_without_role, status_of
from tests.helpers.rpc import KINDS, SERVICE, add_handlers, call, method

CLIENT, WORKER, OPERATOR = "client-token-0123456789", "worker-token-0123456789", "operator-token-0123456789"
GENERATE = "/pdserve.v1.GenerationService/Generate"
REGISTER = "/pdserve.v1.RegistryService/Register"
DRAIN = "/pdserve.v1.RegistryService/DrainWorker"
FLUSH = "/pdserve.v1.GenerationService/FlushCache"
HEALTH = "/grpc.health.v1.Health/Check"
REFLECTION = [f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo" for version in ("v1", "v1alpha")]


def token_file(folder: Path, text: str) -> TokenFile:
    path = folder / text.split("-")[0]
    path.write_text(text)
    path.chmod(0o600)
    return TokenFile(path, flag=f"--{path.name}")


@pytest.fixture
def clients(tmp_path: Path) -> TokenFile:
    return token_file(tmp_path, CLIENT)


@pytest.fixture
def workers(tmp_path: Path) -> TokenFile:
    return token_file(tmp_path, WORKER)


@pytest.fixture
def operators(tmp_path: Path) -> TokenFile:
    return token_file(tmp_path, OPERATOR)


def shown(token: str, scheme: str = "Bearer") -> list[tuple[str, str | bytes]]:
    return [("user-agent", "x"), ("authorization", f"{scheme} {token}")]


def test_every_rpc_of_the_protos_has_the_audience_that_its_documentation_says() -> None:
    assert not list(services_without_role()), "a new service: say who serves it, and who may call it"
    found = {rpc.path: audience_of(rpc.path) for rpc in rpcs()}
    for path, audience in found.items():
        service = path.split("/")[1]
        expected = AUDIENCES.get(service, Audience.WORKER)
        assert audience is expected, path
    assert {a for p, a in found.items() if p.startswith("/pdserve.v1.Generation")} == {Audience.CLIENT}
    internal = ("Registry", "Prefill", "Decode", "Handoff")
    assert {a for p, a in found.items() if any(name in p for name in internal)} == {Audience.WORKER}
    assert audience_of("/new.Service/Method") is Audience.WORKER


def test_a_token_of_each_kind_opens_what_is_for_it_and_nothing_else(clients: TokenFile, workers: TokenFile) -> None:
    gate = Gate(clients=clients, workers=workers)
    assert gate.check_token(GENERATE, shown(CLIENT)) is not None
    assert gate.check_token(REGISTER, shown(WORKER)) is not None
    with pytest.raises(PermissionDenied, match="RegistryService takes no token of this kind, it needs a worker's token"):
        gate.check_token(REGISTER, shown(CLIENT))
    with pytest.raises(PermissionDenied, match="GenerationService takes no token of this kind, it needs a client's token"):
        gate.check_token(GENERATE, shown(WORKER))
    for path in (HEALTH, *REFLECTION):
        assert gate.check_token(path, []) is gate.check_token(path, shown("guess")) is None


def test_operators_with_tokens_alone_may_do_what_concerns_everybody(
    clients: TokenFile, workers: TokenFile, operators: TokenFile
) -> None:
    assert {rpc.path for rpc in rpcs()} >= OPERATOR_METHODS == {FLUSH, DRAIN, "/pdserve.v1.RegistryService/UndrainWorker"}
    gate = Gate(clients=clients, workers=workers, operators=operators)
    for path in OPERATOR_METHODS:
        assert gate.check_token(path, shown(OPERATOR)) is not None
        for other in (CLIENT, WORKER):
            with pytest.raises(PermissionDenied, match=f"^{path[1:]} takes no token of this kind, it needs an operator's token"):
                gate.check_token(path, shown(other))
        with pytest.raises(Unauthenticated, match=f"^{path[1:]} needs an operator's token in the metadata"):
            gate.check_token(path, [])
    assert gate.check_token(GENERATE, shown(OPERATOR)) is not None, "what a client may do"
    with pytest.raises(PermissionDenied):
        gate.check_token(REGISTER, shown(OPERATOR))
    # Without a worker token, where the caller is decides about workers and not about operators.
    alone = Gate(operators=operators)
    assert alone.needs_peer(REGISTER) and not alone.needs_peer(DRAIN)
    assert alone.check_token(GENERATE, []) is None, "clients still need none"


def test_operators_without_tokens_are_whom_the_services_are_for(clients: TokenFile, workers: TokenFile) -> None:
    gate = Gate(clients=clients, workers=workers)
    assert gate.check_token(FLUSH, shown(CLIENT)) is not None and gate.check_token(DRAIN, shown(WORKER)) is not None
    assert Gate().needs_peer(DRAIN) and not Gate().needs_peer(FLUSH)


def test_who_calls_is_told_apart_by_name_and_else_by_token(tmp_path: Path, operators: TokenFile) -> None:
    (path := tmp_path / "many").write_text(f"team-a {CLIENT}\n{CLIENT}-2\nteam-a {CLIENT}-3\noperator-4 {CLIENT}-4\n")
    path.chmod(0o600)
    gate = Gate(clients=TokenFile(path, flag="--many"), operators=operators)

    def who(token: str) -> Any:
        return gate.who(gate.check_token(GENERATE, shown(token)))

    first, second, third = who(CLIENT), who(f"{CLIENT}-2"), who(f"{CLIENT}-3")
    assert first == third != second, "one client while it changes its token"
    assert len({first, second, who(f"{CLIENT}-4"), who(OPERATOR)}) == 4
    assert who(OPERATOR).is_operator and not first.is_operator and not who(f"{CLIENT}-4").is_operator
    path.write_text(f"# a line more\n{CLIENT}-2\n")
    assert who(f"{CLIENT}-2") == second, "wherever it is in the file"
    assert CLIENT not in repr((first, second))
    assert gate.who(None) == NOBODY_KNOWN


@pytest.mark.parametrize(
    "metadata",
    [[], [("authorization", CLIENT)], [("authorization", f"Basic {CLIENT}")], [("Authorization-2", f"Bearer {CLIENT}")]],
)
def test_without_a_bearer_token_the_message_says_how_to_show_one(clients: TokenFile, metadata: Any) -> None:
    with pytest.raises(
        Unauthenticated, match="GenerationService needs a client's token in the metadata: authorization: Bearer TOKEN"
    ):
        Gate(clients=clients).check_token(GENERATE, metadata)


def test_an_unknown_token_is_refused_and_not_repeated_in_the_message(clients: TokenFile) -> None:
    with pytest.raises(Unauthenticated, match="needs a client's token, and the one that was shown is not known here$"):
        Gate(clients=clients).check_token(GENERATE, shown("guess"))
    assert Gate(clients=clients).check_token(GENERATE, shown(CLIENT, "bearer")) is not None


def test_without_worker_tokens_only_this_host_may_join() -> None:
    gate = Gate()
    assert gate.needs_peer(REGISTER) and not gate.needs_peer(GENERATE) and not gate.needs_peer(HEALTH)
    gate.check_peer(REGISTER, "ipv4:127.0.0.1:5")
    with pytest.raises(
        PermissionDenied, match="RegistryService takes callers from other hosts with --worker-token-file or mutual"
    ):
        gate.check_peer(REGISTER, "ipv4:10.0.0.1:5")
    assert not Gate(is_mutual=True).needs_peer(REGISTER) and not Gate(is_open=True).needs_peer(REGISTER)


def test_with_worker_tokens_the_token_decides_wherever_the_caller_is(workers: TokenFile) -> None:
    gate = Gate(workers=workers)
    assert not gate.needs_peer(REGISTER)
    with pytest.raises(Unauthenticated):
        gate.check_token(REGISTER, [])


@pytest.mark.parametrize(
    ("peer", "host", "local"),
    [
        ("ipv4:127.0.0.1:50051", "127.0.0.1", True),
        ("ipv4:10.1.2.3:50051", "10.1.2.3", False),
        ("ipv6:[::1]:50051", "::1", True),
        ("ipv6:%5B::1%5D:50051", "::1", True),
        ("ipv6:[::ffff:127.0.0.1]:5", "::ffff:127.0.0.1", True),
        ("ipv6:[::ffff:10.0.0.1]:5", "::ffff:10.0.0.1", False),
        ("ipv6:[2001:db8::1]:5", "2001:db8::1", False),
        ("unix:/run/x.sock", "unix", True),
        ("unix:", "unix", True),
        ("", "", False),
        ("vsock:2:5", "vsock", False),
    ],
)
def test_where_a_peer_is(peer: str, host: str, local: bool) -> None:
    assert host_of(peer) == host
    assert is_local_peer(peer) is local


def test_the_limit_names_caller_and_number_and_is_each_caller_s_own() -> None:
    limit = CallLimit(2)
    for _ in range(2):
        limit.take("a", name="client a")
    with pytest.raises(ResourceExhausted, match="client a has 2 calls open, the limit is 2 .--max-calls-per-client."):
        limit.take("a", name="client a")
    limit.take("b", name="client b")
    limit.give_back("a")
    limit.take("a", name="client a")
    for caller in "aab":
        limit.give_back(caller)
    assert not limit._open


async def echo(request: bytes, context: Any) -> bytes:
    return request


async def echo_stream(request: bytes, context: Any) -> AsyncIterator[bytes]:
    yield request


async def take_stream(requests: AsyncIterator[bytes], context: Any) -> bytes:
    return b"".join([request async for request in requests])


async def echo_each(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
    async for request in requests:
        yield request


@pytest.mark.parametrize("kind", KINDS)
async def test_a_call_without_a_token_never_reaches_its_handler_whatever_its_kind(kind: str, workers: TokenFile) -> None:
    handlers: dict[str, Any] = dict(zip(KINDS, (echo, echo_stream, take_stream, echo_each), strict=True))
    server = make_server(interceptors=(AuthInterceptor(Gate(workers=workers)),))
    add_handlers(server, {kind: handlers[kind]})
    address = await bind(server, Address("127.0.0.1", 0))
    await server.start()
    async with make_channel(address) as channel:
        for _ in range(3):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(channel, kind)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert caught.value.details() == f"{SERVICE} needs a worker's token in the metadata: authorization: Bearer TOKEN"
        started = method(channel, kind)(
            iter([b"hello"]) if kind.startswith("stream") else b"hello",
            metadata=[("authorization", f"Bearer {WORKER}")],
            timeout=5,
        )
        answers = [r async for r in started] if kind.endswith("stream") else [await started]
        assert answers == [b"hello"]
    await server.stop(0)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_handler_of_any_kind_is_told_who_calls(kind: str, clients: TokenFile, monkeypatch: pytest.MonkeyPatch) -> None:
    async def tell(request: Any, context: Any) -> bytes:
        return who_calls().client.encode()

    async def tell_stream(request: Any, context: Any) -> AsyncIterator[bytes]:
        yield who_calls().client.encode()

    monkeypatch.setitem(AUDIENCES, SERVICE, Audience.CLIENT)
    server = make_server(interceptors=(AuthInterceptor(gate := Gate(clients=clients)),))
    add_handlers(server, {kind: tell_stream if kind.endswith("stream") else tell})
    address = await bind(server, Address("127.0.0.1", 0))
    await server.start()
    async with make_channel(address) as channel:
        requests: Any = iter([b"hello"]) if kind.startswith("stream") else b"hello"
        started = method(channel, kind)(requests, metadata=[("authorization", f"Bearer {CLIENT}")], timeout=5)
        answers = [r async for r in started] if kind.endswith("stream") else [await started]
        expected = gate.who(gate.check_token(GENERATE, shown(CLIENT))).client
        assert answers == [expected.encode()] and expected
    await server.stop(0)


async def test_a_client_s_calls_are_counted_until_they_end() -> None:
    server = make_server(interceptors=(AuthInterceptor(Gate(), limit=CallLimit(1)),))
    from common.rpc.health import Health

    Health(server, [*ROLES["router"]])
    address = await bind(server, Address("127.0.0.1", 0))
    await server.start()
    watch = next(rpc for rpc in rpcs() if rpc.path == "/grpc.health.v1.Health/Watch")
    check = next(rpc for rpc in rpcs() if rpc.path == HEALTH)
    async with make_channel(address) as channel:
        watching = watch.method(channel)(b"", timeout=10)
        await watching.read()
        assert await status_of(channel, check) is grpc.StatusCode.RESOURCE_EXHAUSTED
        watching.cancel()
        await _until_ok(channel, check)
    await server.stop(0)


async def _until_ok(channel: grpc.aio.Channel, rpc: Rpc) -> None:
    from tests.helpers.eventually import eventually

    async def ok() -> bool:
        return await status_of(channel, rpc) is grpc.StatusCode.OK

    await eventually(ok, within=3)
