"""After an attempt: when its completion is in line again, what is said when it is not, and how loudly: functions of values."""

from __future__ import annotations

from common.errors import (
    Aborted,
    Cancelled,
    DeadlineExceeded,
    InvalidArgument,
    PdserveError,
    RemoteOutOfRange,
    ResourceExhausted,
    Unavailable,
)

RETRY_SECONDS = 0.1
"""Before the first retry; doubles. A dead worker's session has ended by then, so that the retry goes elsewhere."""
MAX_RETRY_SECONDS = 1.6
"""And doubles no further: with many attempts allowed the next is a pause, not the rest of a deadline."""
RETURN_SECONDS = 0.1
"""Before what a worker has handed back is in line again: it may not yet be known to be leaving. No longer each time: one that
does not tell its --max-requests has a place for one as soon as another has gone."""
_IN_ORDER = (Aborted, Cancelled, DeadlineExceeded, InvalidArgument, RemoteOutOfRange, ResourceExhausted)


def pause_after_failures(failures: int) -> float:
    """Seconds. failures: at least 1."""
    return min(RETRY_SECONDS * 2.0 ** min(failures - 1, 16), MAX_RETRY_SECONDS)


def is_in_order(error: PdserveError) -> bool:
    """An attempt ends so by its client's deadline or mistake, or at a worker that is full. Two workers that do not suit each
    other (FAILED_PRECONDITION) are for an operator to see, although no other attempt would fare better."""
    return isinstance(error, _IN_ORDER)


def gave_up(error: PdserveError, *, attempts: int) -> PdserveError:
    """What a request is told after its last attempt."""
    return Unavailable(f"gave up after {attempts} attempts; the last: {error}") if attempts > 1 else error
