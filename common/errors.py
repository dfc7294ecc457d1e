"""One family of errors, each class with the gRPC status it becomes at the edge (common/rpc/interceptors.py)."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import grpc


class PdserveError(Exception):
    """Base of every error a peer or client may see. str() is the status message."""

    status = grpc.StatusCode.INTERNAL
    retry_after: timedelta | None = None

    def __init__(self, *args: object, reason: str = "") -> None:
        """reason: why, as one of a few fixed words for metrics; the status's name unless given."""
        super().__init__(*args)
        self._reason = reason

    @property
    def reason(self) -> str:
        return self._reason or self.status.name.lower()

    @property
    def log_text(self) -> str:
        """The message as logs may show it: without a client's text."""
        return str(self)

    def __reduce__(self) -> tuple[Any, ...]:
        # By its message and fields, not by calling a constructor that takes other things.
        return _unpickled, (type(self), self.args), self.__dict__


def _unpickled(cls: type[PdserveError], args: tuple[Any, ...]) -> PdserveError:
    return cls.__new__(cls, *args)


class InvalidRequest(PdserveError):
    """A field breaks its rule: says field, rule and the given value."""

    status = grpc.StatusCode.INVALID_ARGUMENT

    def __init__(self, field: str, rule: str, given: object, *, log_rule: str | None = None) -> None:
        """log_rule: the rule as logs show it, if it quotes the request."""
        shown = repr(given)
        super().__init__(f"{field} {rule}, got {shown if len(shown) <= 100 else shown[:97] + '...'}")
        self.field = field
        number = f", got {shown}" if isinstance(given, int | float) else ""
        self._log_text = f"{field} {log_rule or rule}{number}"

    @property
    def log_text(self) -> str:
        return self._log_text


class OutOfRange(InvalidRequest):
    """A length or size beyond a limit of this deployment."""

    status = grpc.StatusCode.OUT_OF_RANGE


class AlreadyExists(PdserveError):
    """A name that is in use."""

    status = grpc.StatusCode.ALREADY_EXISTS


class NotFound(PdserveError):
    """A name nobody knows."""

    status = grpc.StatusCode.NOT_FOUND


class FailedPrecondition(PdserveError):
    """The system is not in a state for this; retrying the same call does not help."""

    status = grpc.StatusCode.FAILED_PRECONDITION


class Incompatible(FailedPrecondition):
    """Two processes differ in something they must share: names it and both values."""

    def __init__(self, field: str, ours: object, theirs: object, *, our_name: str, their_name: str) -> None:
        super().__init__(f"{field} differs: {theirs!r} on {their_name}, {ours!r} on {our_name}")


class ResourceExhausted(PdserveError):
    """A bounded queue or pool is full: says the limit."""

    status = grpc.StatusCode.RESOURCE_EXHAUSTED

    def __init__(self, message: str, *, retry_after: timedelta | None = None, reason: str = "") -> None:
        """retry_after: when to try again, which the client is told as google.rpc.RetryInfo."""
        super().__init__(message, reason=reason)
        self.retry_after = retry_after


class Full(ResourceExhausted):
    """A worker has as many requests as it takes at once: in a moment it will do, or another one, and nobody is at fault. On the
    wire it is RESOURCE_EXHAUSTED with handed_back (Failure)."""


class Unavailable(PdserveError):
    """A peer is not there right now; another attempt may succeed."""

    status = grpc.StatusCode.UNAVAILABLE


class Leaving(Unavailable):
    """A process that takes no more work because it is being stopped or drained: another one will do, and nobody is at fault. On
    the wire it is UNAVAILABLE with LEAVING_METADATA (calls), or handed_back (Failure)."""


LEAVING_METADATA = ("pdserve-leaving", "1")


class Aborted(PdserveError):
    """The work was ended by somebody."""

    status = grpc.StatusCode.ABORTED


class Cancelled(PdserveError):
    """The caller went away."""

    status = grpc.StatusCode.CANCELLED


class DeadlineExceeded(PdserveError):
    """The deadline passed."""

    status = grpc.StatusCode.DEADLINE_EXCEEDED


class Unimplemented(PdserveError):
    """Named in the API and not offered by this version."""

    status = grpc.StatusCode.UNIMPLEMENTED


class Unauthenticated(PdserveError):
    """The caller has not shown who it is."""

    status = grpc.StatusCode.UNAUTHENTICATED


class PermissionDenied(PdserveError):
    """The caller is known, or comes from where nobody is, and may not do this."""

    status = grpc.StatusCode.PERMISSION_DENIED


class DataLoss(PdserveError):
    """Bytes arrived changed."""

    status = grpc.StatusCode.DATA_LOSS


class StartError(Exception):
    """A process cannot start: printed as one line, exit code 2."""


class InvalidArgument(PdserveError):
    """A peer's INVALID_ARGUMENT, passed on with its own message."""

    status = grpc.StatusCode.INVALID_ARGUMENT


class RemoteOutOfRange(PdserveError):
    """A peer's OUT_OF_RANGE, passed on with its own message."""

    status = grpc.StatusCode.OUT_OF_RANGE


_BY_STATUS: dict[grpc.StatusCode, type[PdserveError]] = {
    cls.status: cls
    for cls in (
        AlreadyExists, NotFound, FailedPrecondition, ResourceExhausted, Unavailable, Aborted, Cancelled, DeadlineExceeded,
        Unimplemented, DataLoss, InvalidArgument, RemoteOutOfRange, Unauthenticated, PermissionDenied,
    )
}  # fmt: skip
_BY_NUMBER = {status.value[0]: status for status in grpc.StatusCode}


def from_status(code: grpc.StatusCode | int, message: str) -> PdserveError:
    """The error of the family for a peer's status (a code or its number); an unknown one becomes PdserveError (INTERNAL)."""
    status = _BY_NUMBER.get(code, grpc.StatusCode.UNKNOWN) if isinstance(code, int) else code
    return _BY_STATUS.get(status, PdserveError)(message)


def status_number(error: PdserveError) -> int:
    """The wire number of the error's status."""
    number: int = error.status.value[0]
    return number
