"""One registered worker as the router sees it: profile, last report, whether a session with it stands, what went to it since."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from common.work import Role, WorkerLoad, WorkerProfile
from router.fleet.circuit import Breaker, Circuit
from router.fleet.estimate import Estimate
from router.fleet.pace import Pace


class WorkerState(StrEnum):
    """As GetCluster shows it."""

    READY = "ready"
    DRAINING = "draining"
    UNREACHABLE = "unreachable"
    LEFT = "left"
    LOST = "lost"


class Departure(StrEnum):
    """How a registration ended."""

    IN_ORDER = "in order"
    SILENT = "silent"
    BROKEN = "broken"
    REPLACED = "replaced"


@dataclass
class Coming:
    """Work of this router that is on its way to a decode worker, still being prefilled: it may not know of it yet."""

    requests: int = 0
    pages: int = 0


class Ours(NamedTuple):
    """This router's part in what a worker has; nothing while it has nothing there. tokens: prompt tokens to compute."""

    tokens: int
    completions: int
    pages: int


@dataclass(eq=False)
class Worker:
    """load: as last reported. tokens, completions, pages: the same, corrected: prompt tokens still to compute, what runs or
    waits, pages in use. coming: not part of those. pace: at which it computes prompts.
    has_session: its Session stream stands, so that it takes work from this router.
    trouble: why it has none; "" while nothing is known.
    is_elsewhere: somebody else answers at its address.
    breaker: whether it gets requests, after faults.
    joined_at, reported_at: clock seconds of its registration and its last report.
    attempts, attempts_failed: of this router that had a part here; those that failed by its fault or maybe its peer's.
    lost_at, lost_because, departure: clock seconds, reason and kind of its registration's end; None and "" while registered.
    """

    profile: WorkerProfile
    load: WorkerLoad = field(default_factory=WorkerLoad)
    tokens: Estimate = field(default_factory=Estimate)
    completions: Estimate = field(default_factory=Estimate)
    pages: Estimate = field(default_factory=Estimate)
    coming: Coming = field(default_factory=Coming)
    pace: Pace = field(default_factory=Pace)
    has_session: bool = False
    trouble: str = ""
    is_elsewhere: bool = False
    joined_at: float = 0.0
    reported_at: float = 0.0
    attempts: int = 0
    attempts_failed: int = 0
    lost_at: float | None = None
    lost_because: str = ""
    departure: Departure | None = None
    breaker: Breaker = field(default_factory=lambda: Breaker(time.monotonic))

    @property
    def id(self) -> str:
        return self.profile.worker_id

    @property
    def role(self) -> Role:
        return self.profile.role

    @property
    def state(self) -> WorkerState:
        if self.lost_at is not None:
            return WorkerState.LEFT if self.departure is Departure.IN_ORDER else WorkerState.LOST
        if self.load.draining:
            return WorkerState.DRAINING
        return WorkerState.UNREACHABLE if self.trouble and not self.has_session else WorkerState.READY

    @property
    def trouble_now(self) -> str:
        """For GetCluster: why it takes no work, or not all it might."""
        if self.breaker.circuit is not Circuit.CLOSED:
            return self.lost_because or self.trouble or self.breaker.last_fault
        return self.lost_because or self.trouble

    @property
    def is_placeable(self) -> bool:
        """Health counts those, whatever their circuits: without requests none would ever be tried again."""
        return self.has_session and self.state is WorkerState.READY

    @property
    def computes_prompts(self) -> bool:
        return self.role == "prefill" or self.profile.local_prefill

    @property
    def requests(self) -> int:
        """Completions it runs or has waiting."""
        return round(self.completions.value) + self.coming.requests

    @property
    def ours(self) -> Ours:
        return Ours(self.tokens.ours, self.completions.ours + self.coming.requests, self.pages.ours + self.coming.pages)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens it has still to compute."""
        return round(self.tokens.value)

    @property
    def available_pages(self) -> int:
        """Free ones and those that its prefix cache would give up, less those spoken for; below 0 if more are."""
        return self.profile.total_pages - round(self.pages.value) - self.coming.pages

    def has_pages(self, count: int | None) -> bool:
        """So many are available, or all it has if that is less. None: it need not have any."""
        return count is None or self.available_pages >= min(count, self.profile.total_pages)

    @property
    def has_place(self) -> bool:
        """In its batch, for a completion that is there now."""
        return round(self.completions.value) < max(1, self.profile.max_running)

    @property
    def takes_prompt_alone(self) -> bool:
        """As a decode worker: one more stays within its max_requests, of which those with their first token are none."""
        limit = self.profile.max_requests
        return not limit or self.coming.requests < limit

    @property
    def fullness(self) -> float:
        """Of places in the batch and pages, the scarcer one's share in use: 0 idle, 1 full, more: work is waiting there.
        (The dominant share of Ghodsi et al., "Dominant Resource Fairness", NSDI 2011.)"""
        places = self.requests / max(1, self.profile.max_running)
        return max(places, 1 - self.available_pages / max(1, self.profile.total_pages))

    def report(self, load: WorkerLoad) -> None:
        self.load = load
        self.tokens.report(load.queued_tokens)
        self.completions.report(load.running + load.waiting)
        self.pages.report(load.pages.held + load.pages.quarantined)

    def __str__(self) -> str:
        return f"{self.role} worker {self.id} at {self.profile.address}"


def least_full(workers: Sequence[Worker]) -> Worker:
    """As decode workers."""
    return min(workers, key=decode_load)


def decode_load(worker: Worker) -> tuple[float, int, str]:
    return worker.fullness, -worker.available_pages, worker.id
