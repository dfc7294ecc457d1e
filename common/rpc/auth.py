"""Who may call what: a token in the metadata of each call, checked before its handler runs.

    authorization: Bearer <token>

| audience | services           | needs                                                             |
| ANYONE   | health, reflection | nothing                                                           |
| CLIENT   | GenerationService  | a client's token, if the router has --auth-token-file             |
| WORKER   | the others         | a worker's token, if this process has --worker-token-file; else a |
|          |                    | certificate (mutual TLS), or a caller of this host                |

The two kinds are apart: a client's token registers no worker and reaches no worker, a worker's token is no client's.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import Enum
from typing import Any, Final
from urllib.parse import unquote

import grpc

from common.errors import PdserveError, PermissionDenied, ResourceExhausted, Unauthenticated
from common.rpc.handlers import Context, rewrap, within
from common.rpc.tokens import Token, TokenFile

HEADER: Final = "authorization"
SCHEME: Final = "Bearer "
FIRST_MESSAGE_SECONDS: Final = 1.0


class Audience(Enum):
    ANYONE = "anyone"
    CLIENT = "client"
    WORKER = "worker"


AUDIENCES: Final = {
    "grpc.health.v1.Health": Audience.ANYONE,
    "grpc.reflection.v1alpha.ServerReflection": Audience.ANYONE,
    "pdserve.v1.GenerationService": Audience.CLIENT,
}
"""A service that is not named here is for workers."""


def audience_of(method: str) -> Audience:
    """method: "/package.Service/Method"."""
    return AUDIENCES.get(service_of(method), Audience.WORKER)


def service_of(method: str) -> str:
    return method.rpartition("/")[0].removeprefix("/")


class Gate:
    """The rules above, as a function of a call's method, metadata and peer."""

    def __init__(
        self,
        *,
        clients: TokenFile | None = None,
        workers: TokenFile | None = None,
        is_mutual: bool = False,
        is_open: bool = False,
    ) -> None:
        """is_mutual: every caller has shown a certificate. is_open: --insecure."""
        self._clients = clients
        self._workers = workers
        self._is_mutual = is_mutual
        self._is_open = is_open

    def needs_peer(self, method: str) -> bool:
        """Only where the caller is decides about this method."""
        return audience_of(method) is Audience.WORKER and self._workers is None and not (self._is_mutual or self._is_open)

    def check_peer(self, method: str, peer: str) -> None:
        """Raises PermissionDenied for a caller from another host. peer: as gRPC writes it."""
        if not is_local_peer(peer):
            raise PermissionDenied(
                f"{service_of(method)} takes callers from other hosts with --worker-token-file or mutual TLS (--tls-ca) only"
            )

    def check_token(self, method: str, metadata: Sequence[tuple[str, str | bytes]]) -> Token | None:
        """The caller's token, None where none is needed. Raises Unauthenticated; PermissionDenied for one of the other kind."""
        audience = audience_of(method)
        accepted, others = self._kinds(audience)
        if not accepted:
            return None
        shown = _bearer(metadata)
        if shown is None:
            raise Unauthenticated(f"{service_of(method)} needs a {audience.value} token in the metadata: {HEADER}: {SCHEME}TOKEN")
        if (token := _find(accepted, shown)) is not None:
            return token
        if _find(others, shown) is not None:
            raise PermissionDenied(f"{service_of(method)} takes no token of this kind, it needs a {audience.value} token")
        raise Unauthenticated(f"the {audience.value} token is not known here")

    def _kinds(self, audience: Audience) -> tuple[list[TokenFile], list[TokenFile]]:
        """Files whose tokens an audience needs, and those whose tokens are known but not enough."""
        clients = [self._clients] if self._clients is not None else []
        workers = [self._workers] if self._workers is not None else []
        match audience:
            case Audience.ANYONE:
                return [], []
            case Audience.CLIENT:
                return clients, workers
            case Audience.WORKER:
                return workers, clients


class CallLimit:
    """How many calls each caller has open."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._open: Counter[str] = Counter()

    def take(self, caller: str) -> None:
        """One call. Raises ResourceExhausted naming the limit."""
        if self._open[caller] >= self._limit:
            raise ResourceExhausted(
                f"{caller} has {self._open[caller]} calls open, the limit is {self._limit} (--max-calls-per-client)"
            )
        self._open[caller] += 1

    def give_back(self, caller: str) -> None:
        self._open[caller] -= 1
        if not self._open[caller]:
            del self._open[caller]


class AuthInterceptor(grpc.aio.ServerInterceptor):
    """Refuses what the gate refuses, and a client's calls beyond the limit. Stands inside of what turns errors into statuses."""

    def __init__(self, gate: Gate, *, limit: CallLimit | None = None) -> None:
        """limit: of the calls that are not workers'."""
        self._gate = gate
        self._limit = limit

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method: str = handler_call_details.method
        try:
            token = self._gate.check_token(method, handler_call_details.invocation_metadata or ())
        except PdserveError as error:
            return _refusing(handler, error)
        if self._gate.needs_peer(method):
            return rewrap(handler, lambda behavior: within(behavior, lambda context: self._local(method, context)))
        if self._limit is not None and audience_of(method) is not Audience.WORKER:
            return rewrap(handler, lambda behavior: within(behavior, lambda context: self._limited(token, context)))
        return handler

    @contextmanager
    def _local(self, method: str, context: Context) -> Iterator[None]:
        self._gate.check_peer(method, context.peer())
        yield

    @contextmanager
    def _limited(self, token: Token | None, context: Context) -> Iterator[None]:
        assert (limit := self._limit) is not None
        caller = f"client {host_of(context.peer())}" if token is None else f"client {token.name}"
        limit.take(caller)
        # Not at the end of the handler: a status that a client does not read keeps its call open (CAP-05).
        ended: Any = lambda _: limit.give_back(caller)  # noqa: E731 - the stubs name a type of callback that is not there
        context.add_done_callback(ended)
        yield


def _refusing(handler: Any, error: PdserveError) -> Any:
    async def refuse(request: Any, context: Context) -> Any:
        if handler.request_streaming:
            # A first write that meets the end of its stream would hide the status from the caller (channels.error_of).
            with suppress(TimeoutError):
                await asyncio.wait_for(anext(request, None), FIRST_MESSAGE_SECONDS)
        raise error

    # Nothing of a stranger's is parsed.
    return rewrap(handler, lambda behavior: refuse, deserializer=None)


def host_of(peer: str) -> str:
    """The host in a peer as gRPC writes it: ipv4:1.2.3.4:5, ipv6:[::1]:5 (maybe percent-encoded), unix:/path."""
    kind, _, rest = unquote(peer).partition(":")
    return rest.rpartition(":")[0].strip("[]") if kind in ("ipv4", "ipv6") else kind


def is_local_peer(peer: str) -> bool:
    host = host_of(peer)
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "unix"
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def _bearer(metadata: Sequence[tuple[str, str | bytes]]) -> str | None:
    for key, value in metadata:
        if key == HEADER and isinstance(value, str) and value[: len(SCHEME)].lower() == SCHEME.lower():
            return value[len(SCHEME) :].strip()
    return None


def _find(files: Sequence[TokenFile], text: str) -> Token | None:
    found = [token for file in files if (token := file.find(text)) is not None]
    return found[0] if found else None
