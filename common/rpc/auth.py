"""Who may call what: a token in the metadata of each call, checked before its handler runs.

    authorization: Bearer <token>

| audience | services           | needs                                                             |
| ANYONE   | health, reflection | nothing                                                           |
| CLIENT   | GenerationService  | a client's or operator's token, if the router has                 |
|          |                    | --auth-token-file                                                 |
| OPERATOR | OPERATOR_METHODS   | an operator's token, if the router has --operator-token-file;     |
|          |                    | else what their service needs                                     |
| WORKER   | the others         | a worker's token, if this process has --worker-token-file; else a |
|          |                    | certificate (mutual TLS), or a caller of this host                |

The kinds are apart: a client's token registers no worker and reaches no worker, a worker's token is no client's. An operator may
do what a client may, to any client's requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from enum import Enum
from typing import Any, Final, NamedTuple

import grpc

from common.errors import PdserveError, PermissionDenied, Unauthenticated
from common.rpc.call_limit import CallLimit
from common.rpc.handlers import Context, rewrap, within
from common.rpc.peer import host_of, is_local_peer
from common.rpc.reflection import SERVICES as REFLECTION
from common.rpc.tokens import Token, TokenFile

HEADER: Final = "authorization"
SCHEME: Final = "Bearer "
FIRST_MESSAGE_SECONDS: Final = 1.0


class Audience(Enum):
    ANYONE = "anyone's"
    CLIENT = "a client's"
    OPERATOR = "an operator's"
    WORKER = "a worker's"


AUDIENCES: Final = {
    "grpc.health.v1.Health": Audience.ANYONE,
    **dict.fromkeys(REFLECTION, Audience.ANYONE),
    "pdserve.v1.GenerationService": Audience.CLIENT,
}
"""A service that is not named here is for workers."""

OPERATOR_METHODS: Final = frozenset(
    {
        "/pdserve.v1.GenerationService/FlushCache",
        "/pdserve.v1.RegistryService/DrainWorker",
        "/pdserve.v1.RegistryService/UndrainWorker",
    }
)
"""What one caller may do to all others. Where no operator has a token they are for whom their service is for."""


class Who(NamedTuple):
    """Who calls. client: the same for all calls of one client, so that what is its own can be told from what is others'; "" where
    clients need no token: then nobody is told from anybody. is_operator: has shown an operator's token."""

    client: str = ""
    is_operator: bool = False


NOBODY_KNOWN: Final = Who()
_calling: ContextVar[Who] = ContextVar("calling", default=NOBODY_KNOWN)


def who_calls() -> Who:
    """Within a handler, and in tasks begun from there."""
    return _calling.get()


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
        operators: TokenFile | None = None,
        is_mutual: bool = False,
        is_open: bool = False,
    ) -> None:
        """is_mutual: every caller has shown a certificate. is_open: --insecure."""
        self._clients = clients
        self._workers = workers
        self._operators = operators
        self._is_mutual = is_mutual
        self._is_open = is_open

    def audience_of(self, method: str) -> Audience:
        """Here, with the kinds of token that there are."""
        is_operators = self._operators is not None and method in OPERATOR_METHODS
        return Audience.OPERATOR if is_operators else audience_of(method)

    def needs_peer(self, method: str) -> bool:
        """Only where the caller is decides about this method."""
        return self.audience_of(method) is Audience.WORKER and self._workers is None and not (self._is_mutual or self._is_open)

    def check_peer(self, method: str, peer: str) -> None:
        """Raises PermissionDenied for a caller from another host. peer: as gRPC writes it."""
        if not is_local_peer(peer):
            raise PermissionDenied(
                f"{service_of(method)} takes callers from other hosts with --worker-token-file or mutual TLS (--tls-ca) only"
            )

    def check_token(self, method: str, metadata: Sequence[tuple[str, str | bytes]]) -> Token | None:
        """The caller's token, None where none is needed. Raises Unauthenticated; PermissionDenied for one of the other kind."""
        audience = self.audience_of(method)
        accepted, others = self._kinds(audience)
        if not accepted:
            return None
        shown = _bearer(metadata)
        called = method.removeprefix("/") if audience is Audience.OPERATOR else service_of(method)
        if shown is None:
            raise Unauthenticated(f"{called} needs {audience.value} token in the metadata: {HEADER}: {SCHEME}TOKEN")
        if (token := _find(accepted, shown)) is not None:
            return token
        if _find(others, shown) is not None:
            raise PermissionDenied(f"{called} takes no token of this kind, it needs {audience.value} token")
        raise Unauthenticated(f"{called} needs {audience.value} token, and the one that was shown is not known here")

    def who(self, token: Token | None) -> Who:
        """token: what check_token gave."""
        if token is None:
            return NOBODY_KNOWN
        # By its kind first: a client may have an operator's name.
        is_operator = self._operators is not None and self._operators.has(token)
        return Who(f"{'operator' if is_operator else 'client'} {token.holder}", is_operator)

    def _kinds(self, audience: Audience) -> tuple[list[TokenFile], list[TokenFile]]:
        """Files whose tokens an audience needs, and those whose tokens are known but not enough."""
        clients = [self._clients] if self._clients is not None else []
        workers = [self._workers] if self._workers is not None else []
        operators = [self._operators] if self._operators is not None else []
        match audience:
            case Audience.ANYONE:
                return [], []
            case Audience.CLIENT:
                return (clients + operators if clients else []), workers
            case Audience.OPERATOR:
                return operators, clients + workers
            case Audience.WORKER:
                return workers, clients + operators


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
        if self._gate.audience_of(method) is not Audience.WORKER and not (self._limit is None and token is None):
            return rewrap(handler, lambda behavior: within(behavior, lambda context: self._known(token, context)))
        return handler

    @contextmanager
    def _local(self, method: str, context: Context) -> Iterator[None]:
        self._gate.check_peer(method, context.peer())
        yield

    @contextmanager
    def _known(self, token: Token | None, context: Context) -> Iterator[None]:
        """The handler may ask who calls. Never taken back: a call has a task of its own."""
        who = self._gate.who(token)
        _calling.set(who)
        if self._limit is not None:
            self._count(self._limit, who, token, context)
        yield

    def _count(self, limit: CallLimit, who: Who, token: Token | None, context: Context) -> None:
        host = host_of(context.peer())
        caller = host if token is None else who.client
        limit.take(caller, name=f"client {host if token is None else token.name}")
        # Not at the end of the handler: a status that a client does not read keeps its call open (CAP-05).
        ended: Any = lambda _: limit.give_back(caller)  # noqa: E731 - the stubs name a type of callback that is not there
        context.add_done_callback(ended)


def _refusing(handler: Any, error: PdserveError) -> Any:
    async def refuse(request: Any, context: Context) -> Any:
        if handler.request_streaming:
            # A first write that meets the end of its stream would hide the status from the caller (channels.error_of).
            with suppress(TimeoutError):
                await asyncio.wait_for(anext(request, None), FIRST_MESSAGE_SECONDS)
        raise error

    # Nothing of a stranger's is parsed.
    return rewrap(handler, lambda behavior: refuse, deserializer=None)


def _bearer(metadata: Sequence[tuple[str, str | bytes]]) -> str | None:
    for key, value in metadata:
        if key == HEADER and isinstance(value, str) and value[: len(SCHEME)].lower() == SCHEME.lower():
            return value[len(SCHEME) :].strip()
    return None


def _find(files: Sequence[TokenFile], text: str) -> Token | None:
    found = [token for file in files if (token := file.find(text)) is not None]
    return found[0] if found else None
