"""A worker's standing with its routers: one Register stream to each, for as long as the worker lives.

    connect -> profile -> accepted -> load, load, ...        every interval, and at once on changed()
       ^                                 |
       '----- back-off, at most 2 s -----+   broken, refused, or the router went away
                                         '--> goodbye, once leave() is called

Start-up order does not matter, and a router that restarts is found again.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import grpc

from common.address import Address
from common.rpc.channels import Connect, error_of, make_channel
from common.rpc.gen.pdserve.v1 import registry_pb2, registry_pb2_grpc
from common.work import WorkerLoad, WorkerProfile
from common.worker_wire import load_to_pb, profile_to_pb

FIRST_PAUSE, LONGEST_PAUSE = timedelta(milliseconds=100), timedelta(seconds=2)
PATIENCE = timedelta(seconds=5)
"""How long a router may leave pings unanswered before its connection is made anew. More than a worker gets: until it has come
anew the router gives it nothing."""
ANSWER_SECONDS = 10.0
"""How long a router may leave a profile unanswered, whose connection is sound, before it is asked anew."""
GOODBYE_SECONDS = 1.0
"""How long routers have to take a goodbye."""
# Between two reports, however often changed() is called.
SHORTEST_GAP = timedelta(milliseconds=20)
_REFUSALS = (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
OnDrain = Callable[[timedelta | None, bool], None]
log = logging.getLogger(__name__)


class Registration:
    """Keeps a worker registered with every router. Lives in the event loop."""

    def __init__(
        self,
        *,
        routers: Sequence[Address],
        profile: WorkerProfile,
        load: Callable[[], WorkerLoad],
        on_drain: OnDrain,
        on_undrain: Callable[[], None] = lambda: None,
        interval: timedelta = timedelta(milliseconds=500),
        connect: Connect = make_channel,
    ) -> None:
        """load: asked for each report. on_drain(grace, stay): a router wants this worker to finish what it runs, within its own
        grace if that is None, and then to go, or to stay and wait for on_undrain."""
        self._links = [_Link(router, profile, load, on_drain, on_undrain, interval, connect) for router in routers]
        for link in self._links:
            link.others = [other for other in self._links if other is not link]

    async def run(self) -> None:
        """Until leave(); cancelling it ends all streams without a goodbye, which the routers take for a loss."""
        async with asyncio.TaskGroup() as group:
            for link in self._links:
                group.create_task(link.keep(), name=f"registration {link.router}")

    async def leave(self) -> None:
        """Says goodbye to every router that has accepted this worker, and waits a moment for them to take it."""
        for link in self._links:
            link.leave()
        async with asyncio.TaskGroup() as group:
            for link in self._links:
                group.create_task(link.left(within_seconds=GOODBYE_SECONDS))

    async def answered(self) -> None:
        """Returns when every router has accepted this worker, refused it or could not be reached."""
        for link in self._links:
            await link.answered.wait()

    def changed(self) -> None:
        """The load changed in a way that routers should know before the next interval."""
        for link in self._links:
            link.wake.set()

    @property
    def registered(self) -> int:
        """Routers that have accepted this worker."""
        return sum(link.accepted.is_set() for link in self._links)


async def _end(tasks: list[asyncio.Task[None]]) -> None:
    """Cancels them and forgets them: a task, its error, the traceback and the frame that awaited it are a ring, which would keep
    the call and its connection until a garbage collection of old objects, which a quiet worker has once in hours."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    tasks.clear()


class _Link:
    """One router."""

    def __init__(
        self,
        router: Address,
        profile: WorkerProfile,
        load: Callable[[], WorkerLoad],
        on_drain: OnDrain,
        on_undrain: Callable[[], None],
        interval: timedelta,
        connect: Connect,
    ) -> None:
        self.router = router
        self.wake = asyncio.Event()
        self.accepted = asyncio.Event()
        self.answered = asyncio.Event()
        """For the first time, in whichever way."""
        self.epoch: int | None = None
        """Of the router that accepted last."""
        self.others: Sequence[_Link] = ()
        """To this worker's other routers, if others they are."""
        self._profile, self._load, self._interval = profile, load, interval
        self._on_drain, self._on_undrain = on_drain, on_undrain
        self._connect = connect
        self._complaint = ""
        self._is_leaving = False
        self._router_is_leaving = False
        self.ended = asyncio.Event()
        """While no stream is accepted."""
        self.ended.set()

    def leave(self) -> None:
        self._is_leaving = True
        self.wake.set()

    async def left(self, *, within_seconds: float) -> None:
        try:
            async with asyncio.timeout(within_seconds):
                await self.ended.wait()
        except TimeoutError:
            pass

    async def keep(self) -> None:
        pause = FIRST_PAUSE
        while not self._is_leaving:
            was_accepted = await self._register()
            pause = FIRST_PAUSE if was_accepted else min(2 * pause, LONGEST_PAUSE)
            # Jittered, so that workers do not return to a restarted router in step.
            await asyncio.sleep(pause.total_seconds() * random.uniform(0.5, 1.0))
            await self._other_names_end()  # Last: it may end because this worker leaves.

    async def _other_names_end(self) -> None:
        """A router takes the later of two registrations for the former's successor: two links would end each other for ever."""
        while (same := self._same_router()) is not None:
            log.warning("router %s is router %s by another name: one registration is enough", self.router, same.router)
            await same.ended.wait()

    def _same_router(self) -> _Link | None:
        if self.epoch is None:
            return None
        return next((other for other in self.others if other.epoch == self.epoch and other.accepted.is_set()), None)

    async def _register(self) -> bool:
        """One stream, from connecting to its end; whether the router accepted."""
        async with self._connect(self.router, silence=PATIENCE) as channel:
            call = registry_pb2_grpc.RegistryServiceStub(channel).Register()
            sides = [asyncio.create_task(self._report(call)), asyncio.create_task(self._follow(call))]
            try:
                if not await self._is_answered(sides):
                    self._complain(f"it has not answered within {ANSWER_SECONDS:g} s", logging.WARNING)
                    return False
                await asyncio.wait(sides, return_when=asyncio.FIRST_COMPLETED)
                # A report that fails does so because the stream ended: its status says why.
                if not sides[1].done() and not isinstance(
                    sides[0].exception(), grpc.RpcError | grpc.aio.BaseError | asyncio.InvalidStateError
                ):
                    sides[0].result()
                await sides[1]
                self._complain("the router ended the stream", logging.WARNING)
            except grpc.aio.AioRpcError as error:
                refused = error.code() in _REFUSALS
                is_other = error.code() is grpc.StatusCode.UNIMPLEMENTED
                text = "what answers there is no router" if is_other else str(error_of(error))
                self._complain(text, logging.ERROR if refused or is_other else logging.WARNING)
            finally:
                was_accepted = self.accepted.is_set()
                self.accepted.clear()
                self.answered.set()
                self.ended.set()
                await _end(sides)
        return was_accepted

    async def _is_answered(self, sides: list[asyncio.Task[None]]) -> bool:
        """Or its stream has ended. One side may hang where the connection does not: nothing else would ever end that."""
        accepted = asyncio.create_task(self.accepted.wait())
        try:
            done, _ = await asyncio.wait([*sides, accepted], timeout=ANSWER_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        finally:
            accepted.cancel()
        return bool(done)

    async def _report(self, call: Any) -> None:
        await call.write(registry_pb2.WorkerStatus(profile=profile_to_pb(self._profile)))
        # A write that meets the end of its stream hides the status (error_of()): nothing is written while a refusal may come.
        await self.accepted.wait()
        while not self._is_leaving:
            self.wake.clear()
            await call.write(registry_pb2.WorkerStatus(load=load_to_pb(self._load())))
            try:
                await asyncio.wait_for(self.wake.wait(), self._interval.total_seconds())
            except TimeoutError:
                continue
            await asyncio.sleep(SHORTEST_GAP.total_seconds())
        await call.write(registry_pb2.WorkerStatus(goodbye=registry_pb2.Goodbye()))
        await call.done_writing()

    async def _follow(self, call: Any) -> None:
        async for directive in call:
            if directive.HasField("accepted"):
                self.epoch = directive.accepted.router_epoch
                self.accepted.set()
                self.answered.set()
                self.ended.clear()
                self._router_is_leaving = False
                self._complaint = ""
                log.info("registered with router %s", self.router)
            elif directive.HasField("drain"):
                grace = timedelta(milliseconds=directive.drain.grace_ms)
                self._on_drain(grace or None, directive.drain.stay)
            elif directive.HasField("undrain"):
                self._on_undrain()
            elif directive.HasField("goodbye"):
                self._router_is_leaving = True

    def _complain(self, text: str, level: int) -> None:
        """Once per reason, not once per retry."""
        if text != self._complaint and not self._is_leaving:
            self._complaint = text
            log.log(
                logging.INFO if self._router_is_leaving else level,
                "no registration with router %s, retrying: %s",
                self.router,
                text,
            )
