"""How long a request waits for a pair of workers while there is none: a function of values.

| why there is none                                    | a new request | one that has begun |
| none came yet, or crashed                            | pair_wait     | pair_wait          |
| drains, or left in order less than return_wait ago   | return_wait   | return_wait        |
| silent: stopped, cut off, or away for a moment       | pair_wait     | return_wait        |

A restart in place is the second row: nobody notices it. A crash ends calls quickly, for whoever balances load can do better.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from router.fleet.workers import Departure, Worker, WorkerState


@dataclass(frozen=True)
class PairWait:
    """return_wait counts from the moment when the worker left, and never beyond that long after the request asked."""

    pair_wait: timedelta
    return_wait: timedelta

    def until(self, workers: Sequence[Worker], *, asked_at: float, now: float, is_begun: bool) -> float:
        """When to give up, in the clock's seconds. workers: registered and recently gone; asked_at: when the wait began."""
        longest = self.return_wait.total_seconds()
        missing = {worker.role for worker in workers} - {worker.role for worker in workers if worker.is_placeable}
        returns = [
            (worker.lost_at or now) + longest
            for worker in workers
            if worker.role in missing and _may_return(worker, is_begun=is_begun)
        ]
        return max(asked_at + self.pair_wait.total_seconds(), min(asked_at + longest, max(returns, default=asked_at)))


def _may_return(worker: Worker, *, is_begun: bool) -> bool:
    if worker.state in (WorkerState.DRAINING, WorkerState.LEFT):
        return True
    return is_begun and (worker.state is WorkerState.UNREACHABLE or worker.departure is Departure.SILENT)
