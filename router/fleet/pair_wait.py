"""How long a request waits for a pair of workers while there is none: a function of values.

| why there is none                                    | a new request | one that was there |
| none came yet, or crashed                            | pair_wait     | pair_wait          |
| one says that it is starting                         | return_wait   | return_wait        |
| drains, or left in order less than return_wait ago   | return_wait   | return_wait        |
| silent: stopped, cut off, or away for a moment       | pair_wait     | return_wait        |

Of each role that is missing; where both are, the shorter. There were those that have begun or stand in line.

So a crash alone ends calls quickly, for whoever balances load can do better than wait for nobody; but where a supervisor starts
the worker again, pair_wait is only the time until its successor has said so, long before it has loaded its model. A restart in
place, in order or not, is a pause.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

from common.work import Role
from router.fleet.arrivals import Arrival
from router.fleet.workers import Departure, Worker, WorkerState


@dataclass(frozen=True)
class PairWait:
    """return_wait counts from the moment when the worker left, or its successor began to start, and never beyond that long after
    the request asked."""

    pair_wait: timedelta
    return_wait: timedelta

    def until(
        self, workers: Sequence[Worker], arrivals: Sequence[Arrival], *, asked_at: float, now: float, is_begun: bool
    ) -> float:
        """When to give up, in the clock's seconds. workers: registered and recently gone; arrivals: starting; asked_at: when the
        wait began; is_begun: it was there before that."""
        there = {worker.role for worker in workers if worker.is_placeable}
        # A worker that does both is a pair alone, and where nobody knows of a prefill worker the next may be one; else it takes
        # one of each role, and what there is less hope for decides.
        is_alone = any(worker.profile.local_prefill for worker in workers)
        roles = {worker.role for worker in workers} | {arrival.role for arrival in arrivals}
        needed: tuple[Role, ...] = ("decode",) if is_alone or "prefill" not in roles else ("prefill", "decode")
        hopes = []
        for role in needed:
            if role not in there:
                away = [worker for worker in workers if worker.role == role]
                coming = [arrival for arrival in arrivals if arrival.role == role]
                hopes.append(max(self._hopes(away, coming, now=now, is_begun=is_begun), default=asked_at))
        hope = min(hopes, default=asked_at)
        return max(asked_at + self.pair_wait.total_seconds(), min(asked_at + self.return_wait.total_seconds(), hope))

    def _hopes(self, away: Sequence[Worker], coming: Sequence[Arrival], *, now: float, is_begun: bool) -> Iterator[float]:
        """Until when each of them may be waited for."""
        longest = self.return_wait.total_seconds()
        yield from (arrival.since + longest for arrival in coming)
        for worker in away:
            if _may_return(worker, is_begun=is_begun):
                yield (worker.lost_at or now) + longest
            elif _is_joining(worker):
                yield worker.joined_at + self.pair_wait.total_seconds()


def _may_return(worker: Worker, *, is_begun: bool) -> bool:
    if worker.state in (WorkerState.DRAINING, WorkerState.LEFT):
        return True
    return is_begun and (worker.state is WorkerState.UNREACHABLE or worker.departure is Departure.SILENT)


def _is_joining(worker: Worker) -> bool:
    """Registered, and its first session is being opened."""
    return worker.state is WorkerState.READY and not worker.has_session
