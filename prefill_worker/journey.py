"""The life of one request on a prefill worker, as the event loop sees it; one asyncio task each.

1. Queued      waits its turn in the engine for pages, a row and a place.
2. Reserving   waits at the decode worker for its pages. A request with a single token to make skips this.
3. Computing   the engine computes chunks; complete pages go to the decode worker while the next chunk runs.
4. Committing  the first tokens are with the router; when every byte has arrived the decode worker takes the request over.
5. Done        the engine forgets the request; an unused ticket is given back, once nothing of it is being sent any more.

Whatever ends it early (cancel, deadline, lost lease, broken transfer, engine fault) comes through one door, end(), once; then the
same clean-up runs as after a good end: stop the sender, have the engine forget, give the ticket back, in this order, because a
page must not be reused while a copy may still touch it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from common.engine.handle import EngineHandle
from common.errors import (
    DeadlineExceeded,
    InvalidArgument,
    InvalidRequest,
    PdserveError,
    RemoteOutOfRange,
    Unavailable,
    Unimplemented,
)
from common.handoff.page_sender import PageSender, Sent
from common.tracing import Tracing
from common.work import FinishReason, TokenOut, WorkFailure
from common.work_key import WorkKey
from prefill_worker.commands import Admit, Compute, Forget, SlotsFree
from prefill_worker.decode_peer import DecodePeer
from prefill_worker.events import Broken, PagesReady, PrefillDone, PrefillStarted
from prefill_worker.lease import Lease
from prefill_worker.metrics import PrefillMetrics
from prefill_worker.order import Order
from prefill_worker.pairing import PairingRefused
from prefill_worker.report import Report
from prefill_worker.states import State, Stateful
from prefill_worker.traces import trace
from prefill_worker.trip import Mark, Trip

_HOPELESS: Final = (InvalidRequest, InvalidArgument, RemoteOutOfRange, DeadlineExceeded, Unimplemented, PairingRefused)
"""Errors that another attempt would meet again; all others are worth one."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Tools:
    """What every journey uses. peer_at: the decode worker at an address. read_page: bytes of one of this worker's pages.
    slots: pages are announced by the slot they lie in, which is to be given back."""

    engine: EngineHandle
    peer_at: Callable[[str], DecodePeer]
    page_bytes: int
    read_page: Callable[[int], memoryview]
    slots: bool
    clock: Callable[[], float]
    verify: bool
    metrics: PrefillMetrics
    tracing: Tracing


class Journey(Stateful):
    """Event loop only. is_ending: only cleaning up is left."""

    def __init__(self, order: Order, *, tools: Tools, report: Report) -> None:
        super().__init__()
        self.key = order.req.key
        self.keys = tuple(self.key.for_completion(offset) for offset in range(order.req.n))
        self._order = order
        self._tools = tools
        self._report = report
        self._peer: DecodePeer | None = None
        self._lease: Lease | None = None
        self._sender: PageSender | None = None
        self._pushing: asyncio.Task[Sent] | None = None
        self._computed: asyncio.Future[PrefillDone] = asyncio.get_running_loop().create_future()
        self._ended_by: set[WorkKey] = set()
        """Completions that have their last token, or that the router does not want any more."""
        self._has_begun = False
        self.is_ending = False
        self._trip = Trip(tools.clock)
        self._cause: PdserveError | None = None
        self._task = asyncio.create_task(self._run(), name=f"journey {self.key}")

    @property
    def task(self) -> asyncio.Task[None]:
        """Done when everything is given back."""
        return self._task

    def cancel(self, key: WorkKey) -> None:
        """The router does not want this completion any more; the journey ends with the last one."""
        self._ended_by.add(key)
        if self._ended_by.issuperset(self.keys):
            self.end(None)

    def end(self, cause: PdserveError | None) -> None:
        """Ends it from outside, with a Failure to the router or, without a cause, in silence. Only the first call counts, none
        once the journey is at its end: clean-up is never cut short (CAN-11)."""
        if not self.is_ending:
            self.is_ending = True
            self._cause = cause
            if self._has_begun:  # A task that is cancelled before its first step never takes it, and would tell nobody.
                self._task.cancel()

    def on_event(self, event: Any) -> None:
        """Something the engine says about this request."""
        match event:
            case PrefillStarted():
                self._tools.metrics.found_cached(event.cached_tokens)
                self._report.started(self.key, cached_tokens=event.cached_tokens)
            case PagesReady():
                assert self._sender is not None
                for page in event.pages:
                    self._sender.put(page.page_index, page.page_id)
            case PrefillDone():
                if not self._computed.done():
                    self._computed.set_result(event)
            case Broken():
                self.end(event.error)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        left = self._order.deadline - self._tools.clock()
        alarm = loop.call_later(left, self.end, DeadlineExceeded("the deadline passed while the prompt was being prefilled"))
        self._has_begun = True
        try:
            if not self.is_ending:
                await self._travel()
        except asyncio.CancelledError:
            pass  # By end(): nobody else knows the task.
        except PdserveError as error:
            self._cause = error
        except Exception:
            _log.exception("journey %s failed", self.key, extra=self._order.extra)
            self._cause = PdserveError("internal error on the prefill worker")
        self.is_ending = True
        alarm.cancel()
        self._report_failure()
        await self._clean_up()
        self.move_to(State.DONE)
        self._tools.metrics.traveled(self._trip, failed=self._cause is not None)
        trace(self._tools.tracing, self._trip, self._order.req, error=None if self._cause is None else self._cause.log_text)

    async def _travel(self) -> None:
        req, engine = self._order.req, self._tools.engine
        await engine.call(Admit(req))
        self.move_to(State.RESERVING)
        self._trip.reach(Mark.ADMITTED)
        if req.output_len > 1:
            await self._reserve()
        self.move_to(State.COMPUTING)
        self._trip.reach(Mark.RESERVED)
        destination = None if self._lease is None else self._lease.destination(verify=self._tools.verify)
        engine.post(Compute(self.key, destination))
        self._start_pushing()
        done = await self._computed
        self._trip.reach(Mark.COMPUTED)
        self._report_tokens(done.tokens)
        if self._lease is None or self._ended_by.issuperset(self.keys):
            return  # The first token was the last one: the ticket goes back unused.
        self.move_to(State.COMMITTING)
        self._trip.reach(Mark.COMMITTING)
        await self._commit(done)

    async def _reserve(self) -> None:
        order = self._order
        self._peer = self._tools.peer_at(order.decode_address)
        self._lease = await self._peer.reserve(
            order.req, decode_worker=order.decode_worker, deadline=order.deadline, on_lost=self.end
        )
        self._trip.transport = self._lease.pairing.transport

    def _start_pushing(self) -> None:
        if self._peer is None or self._lease is None:
            return
        self._sender = self._peer.sender(self._lease, read_page=self._tools.read_page, on_sent=self._on_page_sent)
        if self._sender is not None:
            self._pushing = asyncio.create_task(self._sender.run(), name=f"push {self._lease.ticket}")
            self._pushing.add_done_callback(self._on_pushed)

    def _on_page_sent(self, page_id: int) -> None:
        if self._tools.slots:
            self._tools.engine.post(SlotsFree(self.key, (page_id,)))

    def _on_pushed(self, task: asyncio.Task[Sent]) -> None:
        """A transfer that breaks stops the computing at once."""
        if task.cancelled() or (error := task.exception()) is None:
            return
        if not isinstance(error, PdserveError):
            _log.error("push of %s failed", self.key, exc_info=error, extra=self._order.extra)
            error = PdserveError("internal error while sending KV")
        self.end(error)

    def _report_tokens(self, tokens: tuple[TokenOut, ...]) -> None:
        for token in tokens:
            if token.key not in self._ended_by:
                self._report.first_token(token)
            if token.finish is not None:
                self._ended_by.add(token.key)

    async def _commit(self, done: PrefillDone) -> None:
        assert self._peer is not None and self._lease is not None
        sent = Sent(done.pages_sent, done.page_crc32) if self._pushing is None else await self._pushing
        await self._peer.commit(self._lease, first_tokens=[self._as_committed(token) for token in done.tokens], sent=sent)
        self._trip.reach(Mark.HANDED_OVER)
        self._tools.metrics.handed_over(self._trip, kv_bytes=sent.pages_sent * self._tools.page_bytes)
        self._peer.leases.let_go(self._lease)
        self._lease = None
        for key in self.keys:
            if key not in self._ended_by:
                self._report.handed_off(key)

    def _as_committed(self, token: TokenOut) -> TokenOut:
        """A completion that the router gave up in the meantime is not to be run."""
        if token.finish is None and token.key in self._ended_by:
            return token._replace(finish=FinishReason.ABORT)
        return token

    def _report_failure(self) -> None:
        if (cause := self._cause) is None:
            return
        retryable = not isinstance(cause, _HOPELESS)
        _log.info("request %s ended: %s", self.key, cause, extra=self._order.extra)
        for key in self.keys:
            if key not in self._ended_by:
                failure = WorkFailure.of(key, cause, retryable=retryable)
                self._tools.metrics.failed(cause)
                self._report.failed(failure)

    async def _clean_up(self) -> None:
        if self._pushing is not None:
            self._pushing.cancel()
            await asyncio.wait([self._pushing])
        is_drained = True
        try:
            await self._tools.engine.call(Forget(self.key))
        except Unavailable:
            # An engine that has ended holds no pages here; but what a GPU still does for it, only the end of its process tells.
            is_drained = False
        if self._peer is not None and self._lease is not None:
            self._peer.leases.give_back(self._lease, drained=is_drained)
            self._lease = None
