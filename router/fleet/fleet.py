"""The workers requests can go to: registration and sessions brought together, and the wait for a pair."""

from __future__ import annotations

import asyncio
from datetime import timedelta

from common.errors import Unavailable
from common.rpc.channels import PEER_SILENCE, Connect, make_channel
from router.fleet.capacity import Capacity
from router.fleet.circuits import Circuits
from router.fleet.pair_wait import PairWait
from router.fleet.placement import Ask, seats_for
from router.fleet.policies import Placer
from router.fleet.registry import Registry
from router.fleet.roster import Roster
from router.fleet.sessions import Session, SessionReceiver
from router.fleet.workers import Worker

ANY = Ask(pages=0)
LAST_WORDS = timedelta(seconds=5)
"""How long a worker that has left may take to end its session: its last tokens and its leave come on two connections, so the
leave may be seen first. A session whose worker has died breaks at once."""


class Fleet:
    """A RegistryListener: holds a session to each registered worker."""

    def __init__(
        self,
        registry: Registry,
        *,
        placer: Placer,
        epoch: int,
        receiver: SessionReceiver,
        pair_wait: timedelta,
        return_wait: timedelta | None = None,
        peer_silence: timedelta = PEER_SILENCE,
        connect: Connect = make_channel,
    ) -> None:
        """placer: chooses among the workers that can take a request. pair_wait: how long a request waits while there are none;
        return_wait: while one may come back, as pair_wait.py says; None: not longer. peer_silence: see make_channel."""
        self.registry = registry
        self.circuits = Circuits(registry)
        self.placer = placer
        self._epoch = epoch
        self._receiver = receiver
        self._pair_wait = PairWait(pair_wait=pair_wait, return_wait=return_wait or pair_wait)
        self._peer_silence = peer_silence
        self._connect = connect
        self._sessions: dict[Worker, Session] = {}
        self._tasks: dict[Worker, asyncio.Task[None]] = {}
        self._farewells: dict[Worker, asyncio.TimerHandle] = {}
        """When the session of one that has left is to have ended."""
        self._changed = asyncio.Event()
        self._roster: Roster | None = None
        self._capacity: Capacity | None = None
        self._computing: tuple[Worker, ...] | None = None
        registry.listen(self)

    def joined(self, worker: Worker) -> None:
        if worker in self._sessions:  # It stands.
            self._farewells.pop(worker).cancel()
            return
        channel = self._connect(worker.profile.address, silence=self._peer_silence)
        session = Session(worker, channel=channel, epoch=self._epoch, receiver=self._receiver, on_change=self.registry.notify)
        self._sessions[worker] = session
        self._tasks[worker] = task = asyncio.create_task(session.run(), name=f"session with {worker}")
        task.add_done_callback(lambda _: self._forget(worker))

    def left(self, worker: Worker, *, with_last_words: bool) -> None:
        if with_last_words and worker.has_session:
            loop = asyncio.get_running_loop()
            self._farewells[worker] = loop.call_later(LAST_WORDS.total_seconds(), self._end_session, worker)
        else:
            self._end_session(worker)

    def changed(self) -> None:
        self._roster = self._capacity = self._computing = None
        self._changed.set()
        self._changed = asyncio.Event()

    def reported(self) -> None:
        pass

    @property
    def roster(self) -> Roster:
        """Who may be sent a request now."""
        if (roster := self._roster) is None:
            roster = Roster(self.circuits.willing)
            if self.circuits.are_closed:  # Else it changes with time, too.
                self._roster = roster
        return roster

    @property
    def computing(self) -> tuple[Worker, ...]:
        """Placeable workers that compute prompts, whatever their circuits."""
        if self._computing is None:
            live = self.registry.live
            self._computing = tuple(worker for worker in live if worker.is_placeable and worker.computes_prompts)
        return self._computing

    @property
    def is_idle(self) -> bool:
        """No worker has anything to do, whoever's."""
        return not any(worker.requests or worker.queued_tokens for worker in self.registry.live)

    @property
    def has_places(self) -> bool:
        """Some decode worker would take a completion into its batch at once."""
        return any(worker.has_place for worker in self.registry.live if worker.role == "decode" and worker.is_placeable)

    @property
    def capacity(self) -> Capacity:
        """Of all registered workers."""
        if self._capacity is None:
            self._capacity = Capacity.of(self.registry.live)
        return self._capacity

    @property
    def is_ready(self) -> bool:
        """Some compatible pair takes work."""
        return seats_for(self.registry.live, ANY) is not None

    def session(self, worker: Worker) -> Session | None:
        """None once the worker is gone."""
        return self._sessions.get(worker)

    @property
    def num_unsent(self) -> int:
        """Messages that wait to be sent to workers. Also for the scraping thread."""
        return sum(session.num_unsent for session in list(self._sessions.values()))

    async def until_placeable(self, ask: Ask, *, is_begun: bool = False) -> None:
        """Returns once there are workers that can take it; waits a little, or longer if some may come back. is_begun: it has had
        an attempt, or stood in line before. Raises Unavailable saying why there are none."""
        asked_at = self.registry.now
        while self.roster.seats(ask) is None:
            workers = [*self.registry.live, *self.registry.recently_lost]
            now = self.registry.now
            arrivals = self.registry.arrivals.coming
            until = self._pair_wait.until(workers, arrivals, asked_at=asked_at, now=now, is_begun=is_begun)
            if now >= until:
                raise Unavailable(f"no prefill and decode pair: {self._why_none(ask)}", reason="no_workers")
            try:
                async with asyncio.timeout(min(until - now, self.circuits.seconds_until_try)):
                    await self._changed.wait()
            except TimeoutError:
                pass

    async def flush_prefix_caches(self, *, timeout: timedelta) -> int:
        """Pages freed on all workers. Raises Unavailable naming the first worker that did not answer; the others are flushed."""
        sessions = list(self._sessions.values())
        flushes = [session.flush_prefix_cache(timeout=timeout.total_seconds()) for session in sessions]
        results = await asyncio.gather(*flushes, return_exceptions=True)
        self.placer.flushed()
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return sum(result for result in results if isinstance(result, int))

    async def close(self) -> None:
        """Ends every session."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def why_not_ready(self) -> str:
        """Meaningful while is_ready is False."""
        return self._why_none(ANY)

    def _why_none(self, ask: Ask) -> str:
        live = self.registry.live
        if any(worker.profile.local_prefill for worker in live) and not any(worker.role == "prefill" for worker in live):
            return self.registry.why_none("decode")
        for role in ("prefill", "decode"):
            if not any(worker.role == role and worker.is_placeable for worker in live):
                return self.registry.why_none(role)
        refusing = [worker for worker in live if worker.is_placeable and not worker.breaker.lets_through]
        if refusing:
            return f"the circuit of {refusing[0]} is {refusing[0].breaker.circuit}: {refusing[0].breaker.last_fault}"
        return f"no worker that takes work has a pool of {ask.pages} pages"

    def _end_session(self, worker: Worker) -> None:
        worker.has_session = False  # From now on: who registers again is given a new one.
        # The task itself tells the receiver that everything there is gone, and goes when its channel is closed. It has gone where
        # the whole router is being stopped.
        if (task := self._tasks.get(worker)) is not None:
            task.cancel()

    def _forget(self, worker: Worker) -> None:
        del self._sessions[worker], self._tasks[worker]
        if (farewell := self._farewells.pop(worker, None)) is not None:
            farewell.cancel()
        if not any(other.id == worker.id for other in self._sessions):
            self.placer.left(worker.id)
