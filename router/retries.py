"""When a completion that runs again is in line again, and what is said when it does not: functions of values."""

from __future__ import annotations

from common.errors import PdserveError, Unavailable

RETRY_SECONDS = 0.1
"""Before the first retry; doubles. A dead worker's session has ended by then, so that the retry goes elsewhere."""
MAX_RETRY_SECONDS = 1.6
"""And doubles no further: with many attempts allowed the next is a pause, not the rest of a deadline."""
RETURN_SECONDS = 0.1
"""Before what a worker has handed back is in line again: it may not yet be known to be leaving. No longer each time: one that
does not tell its --max-requests has a place for one as soon as another has gone."""


def pause_after_failures(failures: int) -> float:
    """Seconds. failures: at least 1."""
    return min(RETRY_SECONDS * 2.0 ** min(failures - 1, 16), MAX_RETRY_SECONDS)


def gave_up(error: PdserveError, *, attempts: int) -> PdserveError:
    """What a request is told after its last attempt."""
    return Unavailable(f"gave up after {attempts} attempts; the last: {error}") if attempts > 1 else error
