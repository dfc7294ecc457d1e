"""Who is registered: workers by id, checked for compatibility when they join, and why others were refused."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Protocol

from common.address import Address
from common.errors import FailedPrecondition, InvalidRequest
from common.work import POOL_LAYOUT, PROTOCOL_VERSION, Role, WorkerLoad, WorkerProfile
from router.fleet.arrivals import Arrivals
from router.fleet.workers import Departure, Worker, WorkerState

LOST_SHOWN_SECONDS = 30.0
"""How long a lost worker stays listed, and a refusal counts as the reason why there is no pair."""

MAX_REFUSALS = 256
"""Addresses whose last refusal is remembered."""
log = logging.getLogger(__name__)


class RegistryListener(Protocol):
    """Told of every change, in the event loop; must not block."""

    def joined(self, worker: Worker) -> None:
        """New, or one that had left with last words and has registered again before its session ended."""

    def left(self, worker: Worker, *, with_last_words: bool) -> None:
        """with_last_words: what it has sent before it went may still be under way."""

    def changed(self) -> None:
        """A worker's state may have changed; also after joined and left."""

    def reported(self) -> None:
        """A worker has reported its load."""


@dataclass(frozen=True)
class Refusal:
    """The last refused registration from one address."""

    role: Role
    reason: str
    at: float


class Registry:
    """Owned by the event loop. A client's mistake never changes a worker's state (FLT-07): only registration and reports do."""

    def __init__(
        self,
        *,
        fingerprint: str,
        remember: timedelta = timedelta(seconds=LOST_SHOWN_SECONDS),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """fingerprint: of the router's own model folder; every worker's must equal it. remember: for how long, or
        LOST_SHOWN_SECONDS if that is longer, a worker that is gone is still known."""
        self._fingerprint = fingerprint
        self._remember_seconds = max(LOST_SHOWN_SECONDS, remember.total_seconds())
        self._clock = clock
        self._live: dict[str, Worker] = {}
        self._lost: list[Worker] = []
        self._refusals: dict[str, Refusal] = {}
        self._replaced: dict[tuple[str, str], Worker] = {}
        """By id and address of the former: elsewhere a worker of that id is somebody else (or the former an impostor)."""
        self._listeners: list[RegistryListener] = []
        self.arrivals = Arrivals(clock, on_change=self.notify)

    def listen(self, listener: RegistryListener) -> None:
        self._listeners.append(listener)

    def join(self, profile: WorkerProfile) -> Worker:
        """Registers a worker; a live one at the same address, or with the same id, is its former self and is lost. A process
        whose session has outlasted its registration is the Worker that it was, and what runs there goes on.

        Raises InvalidRequest for a malformed profile, Incompatible naming both values, FailedPrecondition for a worker whose
        address has been taken over by a successor.
        """
        try:
            self._check(profile)
        except FailedPrecondition as error:
            if len(self._refusals) >= MAX_REFUSALS:
                del self._refusals[next(iter(self._refusals))]
            self._refusals[profile.address] = Refusal(profile.role, str(error), self._clock())
            raise
        self._refusals.pop(profile.address, None)
        if (same := self._still_in_session(profile)) is not None:
            return self._resume(same)
        now = self._clock()
        worker = Worker(profile, joined_at=now, reported_at=now)
        self._inherit(worker)
        for former in self._predecessors(profile):
            if former.id != worker.id:
                self._replaced[former.id, former.profile.address] = worker
            self.leave(former, f"{worker.id} has registered from the same address", Departure.REPLACED)
        # One process is one entry: what it was before it came back is no worker that is missing.
        self._lost = [gone for gone in self._lost if (gone.id, gone.profile.address) != (worker.id, profile.address)]
        self._live[worker.id] = worker
        log.info("%s registered: %s, %d pages", worker, profile.device, profile.total_pages)
        self._tell(lambda listener: listener.joined(worker))
        return worker

    def report(self, worker: Worker, load: WorkerLoad) -> None:
        before = worker.state
        worker.reported_at = self._clock()
        worker.report(load)
        if worker.state is not before:
            log.info("%s is %s", worker, worker.state)
            self.notify()
        for listener in self._listeners:
            listener.reported()

    def leave(self, worker: Worker, reason: str, departure: Departure) -> None:
        """The worker's registration ended. Idempotent: the first departure counts."""
        if self._live.get(worker.id) is not worker:
            return
        del self._live[worker.id]
        self._replaced = {old: successor for old, successor in self._replaced.items() if successor is not worker}
        worker.lost_at, worker.lost_because, worker.departure = self._clock(), reason, departure
        self._lost = [*self.recently_lost, worker]
        if departure is Departure.IN_ORDER:
            log.info("%s has left: %s", worker, reason)
        else:
            log.warning("%s is lost: %s", worker, reason)
        with_last_words = departure in (Departure.IN_ORDER, Departure.BROKEN)
        self._tell(lambda listener: listener.left(worker, with_last_words=with_last_words))

    def notify(self) -> None:
        """Something about a worker has changed."""
        for listener in self._listeners:
            listener.changed()

    @property
    def now(self) -> float:
        """Seconds of the clock that lost_at is in."""
        return self._clock()

    @property
    def live(self) -> list[Worker]:
        """Registered workers, draining ones included."""
        return list(self._live.values())

    @property
    def recently_lost(self) -> list[Worker]:
        """Those that left in order among them. Also for the scraping thread."""
        now, seconds = self._clock(), self._remember_seconds
        return [worker for worker in self._lost if worker.lost_at is not None and now - worker.lost_at < seconds]

    def why_none(self, role: Role) -> str:
        """Why no worker of this role takes requests now."""
        return self._why_none(role) + ("; one is starting" if self.arrivals.has(role) else "")

    def _why_none(self, role: Role) -> str:
        live = [worker for worker in self._live.values() if worker.role == role]
        if not live:
            return self._why_none_registered(role)
        if all(worker.state is WorkerState.DRAINING for worker in live):
            return f"every {role} worker is draining"
        closed = [worker for worker in live if worker.state is not WorkerState.DRAINING and not worker.has_session]
        if closed:
            return f"no session with {closed[0]}: {closed[0].trouble or 'not opened yet'}"
        return f"no {role} worker that takes work has a pool large enough"

    def _why_none_registered(self, role: Role) -> str:
        now = self._clock()
        recent = [
            refusal for refusal in self._refusals.values() if refusal.role == role and now - refusal.at < LOST_SHOWN_SECONDS
        ]
        if recent:
            return f"no compatible {role} worker is registered ({max(recent, key=lambda refusal: refusal.at).reason})"
        lost = [worker for worker in self.recently_lost if worker.role == role]
        if not lost:
            return f"no {role} worker is registered"
        how = "has left" if lost[-1].state is WorkerState.LEFT else "was lost"
        return f"no {role} worker is registered ({lost[-1]} {how}: {lost[-1].lost_because})"

    def _check(self, profile: WorkerProfile) -> None:
        if not profile.worker_id:
            raise InvalidRequest("worker_id", "must not be empty", profile.worker_id)
        try:
            Address.parse(profile.address)
        except ValueError as error:
            raise InvalidRequest("address", str(error).partition(", got")[0], profile.address) from None
        name = f"{profile.role} worker {profile.worker_id} at {profile.address}"
        theirs = profile.compatibility
        ours = replace(theirs, fingerprint=self._fingerprint, pool_layout=POOL_LAYOUT, protocol_version=PROTOCOL_VERSION)
        ours.check(theirs, our_name="the router", their_name=name)
        # Only now: one of another protocol may well leave out what this one needs.
        sizes = {"total_pages": profile.total_pages, "page_size": theirs.page_size, "max_context": theirs.max_context}
        for field, size in sizes.items():
            if size < 1:  # Left out by whoever wrote it: no request can be measured by it, and no other worker agrees with it.
                raise InvalidRequest(field, "must be at least 1", size)
        former = self._predecessors(profile)
        for worker in self._live.values():
            if worker not in former:
                worker.profile.compatibility.check(theirs, our_name=str(worker), their_name=name)
        successor = self._replaced.get((profile.worker_id, profile.address))
        # One that was told a wrong --advertise is no successor of whoever it names.
        if successor is not None and not successor.is_elsewhere:
            raise FailedPrecondition(f"{successor} has taken over from {name}")

    def _still_in_session(self, profile: WorkerProfile) -> Worker | None:
        """The process with this profile, if only its registration stream has broken: whether we have noticed or not."""
        for worker in [*self._live.values(), *self._lost]:
            is_same = worker.profile == profile and worker.departure in (None, Departure.BROKEN)
            if is_same and worker.has_session and self._predecessors(profile) in ([], [worker]):
                return worker
        return None

    def _resume(self, worker: Worker) -> Worker:
        log.info("%s has registered again; its session stood", worker)
        worker.reported_at = self._clock()
        if worker.lost_at is not None:
            worker.lost_at, worker.lost_because, worker.departure = None, "", None
            self._lost.remove(worker)
            self._live[worker.id] = worker
            self._tell(lambda listener: listener.joined(worker))
        return worker

    def _inherit(self, worker: Worker) -> None:
        """A process that comes back has the circuit it had."""
        for former in [*self._lost, *self._live.values()]:
            if former.id == worker.id:
                worker.breaker = former.breaker

    def _predecessors(self, profile: WorkerProfile) -> list[Worker]:
        return [
            worker
            for worker in self._live.values()
            if worker.id == profile.worker_id or worker.profile.address == profile.address
        ]

    def _tell(self, event: Callable[[RegistryListener], None]) -> None:
        for listener in self._listeners:
            event(listener)
        self.notify()
