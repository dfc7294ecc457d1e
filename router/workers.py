"""One registered worker as the router sees it: profile, last report, whether a session with it stands, what went to it since."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from common.work import Role, WorkerLoad, WorkerProfile


class WorkerState(StrEnum):
    """As GetCluster shows it."""

    READY = "ready"
    DRAINING = "draining"
    LOST = "lost"


@dataclass
class Sent:
    """Work sent to a worker since its last report, which therefore does not show it yet."""

    requests: int = 0
    tokens: int = 0
    pages: int = 0


@dataclass(eq=False)
class Worker:
    """load: as last reported.
    has_session: its Session stream stands, so that it takes work from this router.
    trouble: why it has none; "" while nothing is known.
    lost_at, lost_because: clock seconds and reason of its registration's end; None and "" while registered.
    """

    profile: WorkerProfile
    load: WorkerLoad = field(default_factory=WorkerLoad)
    sent: Sent = field(default_factory=Sent)
    has_session: bool = False
    trouble: str = ""
    lost_at: float | None = None
    lost_because: str = ""

    @property
    def id(self) -> str:
        return self.profile.worker_id

    @property
    def role(self) -> Role:
        return self.profile.role

    @property
    def state(self) -> WorkerState:
        if self.lost_at is not None:
            return WorkerState.LOST
        return WorkerState.DRAINING if self.load.draining else WorkerState.READY

    @property
    def is_placeable(self) -> bool:
        return self.has_session and self.state is WorkerState.READY

    @property
    def requests(self) -> int:
        """Completions it runs or has waiting."""
        return self.load.running + self.load.waiting + self.sent.requests

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens it has still to compute."""
        return self.load.queued_tokens + self.sent.tokens

    @property
    def available_pages(self) -> int:
        """Free ones and those that its prefix cache would give up; all of them before its first report."""
        pages = self.load.pages
        return (pages.free + pages.cached if pages.total else self.profile.total_pages) - self.sent.pages

    @property
    def fullness(self) -> float:
        """Of places in the batch and pages, the scarcer one's share in use: 0 idle, 1 full, more: work is waiting there.
        (The dominant share of Ghodsi et al., "Dominant Resource Fairness", NSDI 2011.)"""
        places = self.requests / max(1, self.profile.max_running)
        return max(places, 1 - self.available_pages / max(1, self.profile.total_pages))

    def report(self, load: WorkerLoad) -> None:
        """Takes a load report, which shows what was sent before it."""
        self.load = load
        self.sent = Sent()

    def note_sent(self, *, requests: int, tokens: int, pages: int) -> None:
        self.sent.requests += requests
        self.sent.tokens += tokens
        self.sent.pages += pages

    def __str__(self) -> str:
        return f"{self.role} worker {self.id} at {self.profile.address}"
