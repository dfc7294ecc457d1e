"""A worker's circuit breaker: who fails again and again gets nothing for a while, then one request at a time, then all again.

CLOSED --faults--> OPEN --a pause--> HALF_OPEN --success--> CLOSED
                    ^-------fault--------'                            each time in a row the pause doubles

Only faults that may be the worker's count (is_fault): never a client's mistake (FLT-07), never a worker that is full or leaves in
order. Many requests that fail together are one fault. Where either of two workers may have been at fault, each gets half of one;
a success clears its worker, so that soon only the culprit has any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from common.errors import Aborted, Cancelled, DeadlineExceeded, FailedPrecondition, Leaving, PdserveError, ResourceExhausted

if TYPE_CHECKING:
    from router.fleet.workers import Worker

FAULTS_TO_OPEN: Final = 3.0
TOGETHER_SECONDS: Final = 0.2
"""Faults this close to the last one count as the same."""
FORGET_SECONDS: Final = 60.0
"""A fault this long ago says nothing any more."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 1.0, 30.0
LONE_PAUSE_SECONDS: Final = 2.0
"""The longest where a role has nobody else: shorter than a request waits for a worker, so that none fails for a fault that is
over."""

_NO_FAULT = (Aborted, Cancelled, DeadlineExceeded, FailedPrecondition, Leaving, ResourceExhausted)


class Circuit(StrEnum):
    """As GetCluster shows it."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


def is_fault(error: PdserveError, *, retryable: bool) -> bool:
    """Whether an attempt that failed so may have failed through its worker's doing. What another attempt would meet again is
    about the request."""
    return retryable and not isinstance(error, _NO_FAULT)


class Breaker:
    """One per worker; event loop only. clock: seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._faults = 0.0
        self._fault_at = float("-inf")
        self._pause_seconds = 0.0
        """Of the last opening; 0 while closed."""
        self._paused_at = 0.0
        """When it was opened or tried last."""
        self.try_at = 0.0
        """When the next request may try the worker, while not closed."""
        self._is_tried = False
        self.last_fault = ""

    @property
    def circuit(self) -> Circuit:
        if self._pause_seconds == 0.0:
            return Circuit.CLOSED
        return Circuit.HALF_OPEN if self._is_tried or self._clock() >= self.try_at else Circuit.OPEN

    @property
    def lets_through(self) -> bool:
        """The worker may get a request now."""
        return self._pause_seconds == 0.0 or self._clock() >= self.try_at

    @property
    def seconds_until_try(self) -> float:
        """Until lets_through, at the earliest; 0 if it does."""
        return 0.0 if self.lets_through else self.try_at - self._clock()

    @property
    def seconds_until_lone_try(self) -> float:
        """The same where its role has nobody else."""
        return min(self.seconds_until_try, max(0.0, self._paused_at + LONE_PAUSE_SECONDS - self._clock()))

    def sent(self) -> None:
        """A request goes to the worker. While half-open it is a try, and the next one waits for its outcome, or as long as the
        last pause if it has none (its client left)."""
        if self._pause_seconds > 0.0:
            self._is_tried = True
            self._paused_at = self._clock()
            self.try_at = self._paused_at + self._pause_seconds

    def succeeded(self) -> bool:
        """The worker did its part of a request. True: this closed the circuit."""
        closes = self._pause_seconds > 0.0
        self._faults, self._pause_seconds, self._is_tried = 0.0, 0.0, False
        return closes

    def failed(self, reason: str, *, share: float) -> bool:
        """share: 1 if the worker is at fault, less if it is one of several suspects. True: this opened the circuit."""
        now = self._clock()
        self.last_fault = reason
        if self._pause_seconds > 0.0:
            return self._is_tried and self._open(now)
        if now - self._fault_at < TOGETHER_SECONDS:
            return False
        if now - self._fault_at > FORGET_SECONDS:
            self._faults = 0.0
        self._faults += share
        self._fault_at = now
        return self._faults >= FAULTS_TO_OPEN and self._open(now)

    def _open(self, now: float) -> bool:
        self._pause_seconds = min(LONGEST_PAUSE_SECONDS, 2 * self._pause_seconds or FIRST_PAUSE_SECONDS)
        self._paused_at, self.try_at = now, now + self._pause_seconds
        self._is_tried = False
        return True


def waits(workers: Iterable[Worker]) -> list[tuple[Worker, float]]:
    """How many seconds from now the circuit of each lets a request through, at the earliest."""
    there = [(worker, worker.breaker) for worker in workers]
    served = {worker.role for worker, breaker in there if worker.is_placeable and breaker.lets_through}
    return [
        (worker, breaker.seconds_until_try if worker.role in served else breaker.seconds_until_lone_try)
        for worker, breaker in there
    ]


def willing(workers: Iterable[Worker]) -> list[Worker]:
    """Those whose circuits let a request through, and one on trial at most, so that a fault tells who is to blame; more only
    where a role has nobody else."""
    through = [worker for worker, seconds in waits(workers) if seconds == 0.0]
    trusted = [worker for worker in through if worker.breaker.circuit is Circuit.CLOSED]
    if len(trusted) == len(through):
        return through
    on_trial = min((worker for worker in through if worker not in trusted), key=lambda worker: worker.breaker.try_at)
    roles = {worker.role for worker in trusted}
    return [worker for worker in through if worker in trusted or worker is on_trial or worker.role not in roles]
