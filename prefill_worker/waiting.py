"""Waiting: jobs that have no pages yet, in the order in which they will get them."""

from __future__ import annotations

from bisect import bisect_left, insort
from operator import attrgetter

from prefill_worker.job import Job


class Waiting:
    """By Job.precedence alone: whoever is first keeps the others waiting, so that a large prompt is not starved by small ones."""

    def __init__(self) -> None:
        self._jobs: list[Job] = []

    def __len__(self) -> int:
        return len(self._jobs)

    def add(self, job: Job) -> None:
        insort(self._jobs, job, key=_precedence)

    def first(self) -> Job | None:
        return self._jobs[0] if self._jobs else None

    def remove(self, job: Job) -> None:
        """Raises AssertionError unless the job is here."""
        at = bisect_left(self._jobs, job.precedence, key=_precedence)
        assert self._jobs[at] is job, f"{job.key} is not waiting"
        del self._jobs[at]


_precedence = attrgetter("precedence")
