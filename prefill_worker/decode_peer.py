"""DecodePeer: one decode worker's address as a prefill worker sees it: Reserve, the sender for what was reserved, and Commit."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import cached_property, partial
from typing import Final

import grpc

from common.core import Req
from common.engine.handle import EngineHandle
from common.errors import Aborted, AlreadyExists, FailedPrecondition, Unavailable
from common.handoff.base import SENDER_WRITES
from common.handoff.grpc_sender import GrpcSender
from common.handoff.page_sender import PageSender, Sent
from common.handoff.sim_link import SimLink, SimSender
from common.rpc.channels import error_of, is_silence
from common.rpc.gen.pdserve.v1 import decode_pb2, decode_pb2_grpc, handoff_pb2_grpc
from common.wire import req_to_pb, token_to_pb
from common.work import TokenOut
from prefill_worker.acquaintance import Acquaintance
from prefill_worker.errands import Errands
from prefill_worker.lease import SAFE_SHARE, Lease, OnLost
from prefill_worker.leases import RENEW_SHARE, SECOND_OPINION_SECONDS, Leases
from prefill_worker.pairing import Pairing
from prefill_worker.peer_errors import NO_ANSWER, peer_error
from prefill_worker.terms import Terms

ANSWER_MARGIN_SECONDS: Final = 2.0
"""A Reserve call outlives the deadline it carries by this, so that it is the decode worker that ends the wait."""
COMMIT_PAUSE_SECONDS: Final = 0.05


class _Unheard(Aborted):
    """The decode worker may have answered while this process stood still."""


class DecodePeer:
    """Event loop only."""

    def __init__(self, address: str, *, terms: Terms, engine: EngineHandle, clock: Callable[[], float] = time.monotonic) -> None:
        self.address = address
        self.last_used = clock()
        self._terms = terms
        self._clock = clock
        self._channel = terms.connect(address)
        self._stub = decode_pb2_grpc.DecodeServiceStub(self._channel)
        self._bulk_channel: grpc.aio.Channel | None = None
        self._errands = Errands()
        self._reserving = 0
        self.leases = Leases(self._stub, post=engine.post, clock=clock, stood_still=terms.stood_still)
        self._acquaintance = Acquaintance(
            self._stub, address=address, terms=terms, engine=engine, errands=self._errands, on_gone=self.leases.lose_all
        )

    @property
    def is_idle(self) -> bool:
        return self.leases.is_idle and not self._errands and self._reserving == 0

    @property
    def has_ended(self) -> bool:
        """The decode worker met here last is known to have ended; another may come to the same address."""
        return self._acquaintance.has_ended

    async def reserve(self, req: Req, *, decode_worker: str, deadline: float, on_lost: OnLost) -> Lease:
        """Waits for pages at decode_worker until `deadline` (clock seconds). The lease is renewed until given back or let go.

        Raises PairingRefused, Unavailable (also when another worker answers at this address) or the decode worker's refusal.
        Cancelling it gives back a ticket that is granted later.
        """
        self.last_used = self._clock()
        self._reserving += 1
        try:
            return await self._reserved(req, decode_worker=decode_worker, deadline=deadline, on_lost=on_lost)
        finally:
            self._reserving -= 1

    async def _reserved(self, req: Req, *, decode_worker: str, deadline: float, on_lost: OnLost) -> Lease:
        ask = partial(self._ask, req, deadline=deadline, on_lost=on_lost)
        pairing = await self._acquaintance.pairing_with(decode_worker)
        try:
            lease = await ask(pairing)
        except FailedPrecondition:  # It has forgotten the pairing.
            self._acquaintance.drop(pairing)
            lease = await ask(await self._acquaintance.pairing_with(decode_worker))
        except _Unheard:
            self._acquaintance.drop(pairing)
            lease = await self._second_opinion(ask, decode_worker)
        await self._freshen(lease)
        self.leases.keep(lease)
        return lease

    async def _second_opinion(self, ask: Callable[[Pairing], Awaitable[Lease]], decode_worker: str) -> Lease:
        try:
            async with asyncio.timeout(SECOND_OPINION_SECONDS):
                pairing = await self._acquaintance.pairing_with(decode_worker)
        except TimeoutError:
            raise Unavailable(f"the decode worker at {self.address} is silent") from None
        try:
            return await ask(pairing)
        except AlreadyExists:  # The first answer was a grant that nobody has read; its lease ends soon.
            raise Aborted(f"the decode worker at {self.address} has granted this already, unheard") from None

    def sender(
        self, lease: Lease, *, read_page: Callable[[int], memoryview], on_sent: Callable[[int], None]
    ) -> PageSender | None:
        """What pushes this lease's pages; None if the engine itself writes them or there are none."""
        if not lease.page_ids:
            return None
        if isinstance(link := lease.pairing.link, SimLink):
            return self._sim_sender(link, lease, read_page)
        if lease.pairing.transport != "grpc":
            return None
        return GrpcSender(
            self._handoff,
            ticket=lease.ticket,
            page_count=len(lease.page_ids),
            read_page=read_page,
            on_sent=on_sent,
            stall_timeout=self._terms.transfer_timeout,
            verify=self._terms.verify,
        )

    @cached_property
    def _handoff(self) -> handoff_pb2_grpc.HandoffServiceStub:
        # Apart from the rest, so that a transfer that stalls does not hold up the renewal of its own and others' leases.
        self._bulk_channel = self._terms.connect(self.address)
        return handoff_pb2_grpc.HandoffServiceStub(self._bulk_channel)

    def _sim_sender(self, link: SimLink, lease: Lease, read_page: Callable[[int], memoryview]) -> SimSender:
        assert self._terms.sim is not None, "only a simulated worker opens a simulated pool"
        return SimSender(
            link,
            self._terms.sim,
            page_ids=lease.page_ids,
            read_page=read_page,
            deadline=lambda: lease.deadline,
            verify=self._terms.verify,
            clock=self._clock,
        )

    async def commit(self, lease: Lease, *, first_tokens: Sequence[TokenOut], sent: Sent) -> None:
        """Hands the request over; repeated until answered, the lease ends or the transfer timeout is over. Raises refusals, and
        Unavailable without an answer: it may run there then, which its router sees."""
        lease.is_committing = True
        request = decode_pb2.CommitRequest(
            ticket=lease.ticket,
            first_tokens=map(token_to_pb, first_tokens),
            pages_sent=sent.pages_sent,
            page_crc32=sent.page_crc32,
        )
        give_up = self._clock() + self._terms.transfer_timeout.total_seconds()
        while (left := min(give_up, lease.deadline) - self._clock()) > 0:
            try:
                await self._stub.Commit(request, timeout=min(left, lease.length_seconds * RENEW_SHARE))
                return
            except grpc.aio.AioRpcError as error:
                if error.code() not in NO_ANSWER or (is_silence(error) and not self._terms.stood_still()):
                    raise error_of(error) from None
                if is_silence(error):
                    give_up = min(give_up, self._clock() + SECOND_OPINION_SECONDS)
            await asyncio.sleep(COMMIT_PAUSE_SECONDS)
        raise Unavailable(f"decode worker {lease.pairing.worker_id} at {self.address} did not answer Commit in time")

    async def close(self, *, patience_seconds: float = 1.0) -> None:
        """Once nothing uses the peer any more, except releases under way, which get that long."""
        await self._errands.close()
        await self.leases.close(patience_seconds=patience_seconds)
        await self._acquaintance.close()
        await self._channel.close(None)
        if self._bulk_channel is not None:
            await self._bulk_channel.close(None)

    async def _ask(self, req: Req, pairing: Pairing, *, deadline: float, on_lost: OnLost) -> Lease:
        # As an errand: a ticket granted to nobody would keep its pages withheld there until this process ends.
        pairing.hold()
        return await self._errands.run(
            self._reserve(pairing, req, deadline=deadline, on_lost=on_lost), if_unread=self.leases.give_back
        )

    async def _reserve(self, pairing: Pairing, req: Req, *, deadline: float, on_lost: OnLost) -> Lease:
        """One Reserve. Takes over one hold on the pairing and passes it on to the lease."""
        left = max(0.001, deadline - self._clock())
        request = decode_pb2.ReserveRequest(
            pair_id=pairing.pair_id, req=req_to_pb(req), transport=pairing.transport, verify=self._terms.verify
        )
        request.req.deadline_ms = max(1, int(left * 1000))
        sent = self._clock()
        try:
            response = await self._stub.Reserve(request, timeout=left + ANSWER_MARGIN_SECONDS)
        except BaseException as error:
            self._end_unanswered(pairing, error, waited_out=self._clock() - sent >= left + ANSWER_MARGIN_SECONDS)
            pairing.let_go()
            if isinstance(error, grpc.aio.AioRpcError) and is_silence(error) and self._terms.stood_still():
                raise _Unheard("this process stood still when the decode worker may have answered") from None
            if isinstance(error, grpc.aio.AioRpcError):
                raise peer_error(error, address=self.address) from None
            raise
        return Lease(
            key=req.key,
            request_id=req.request_id,
            ticket=response.ticket,
            pairing=pairing,
            page_ids=tuple(response.page_ids),
            prefix_len=response.prefix_len,
            length_seconds=response.lease_ms / 1000,
            deadline=sent + SAFE_SHARE * response.lease_ms / 1000,
            on_lost=on_lost,
        )

    def _end_unanswered(self, pairing: Pairing, error: BaseException, *, waited_out: bool) -> None:
        """A Reserve that broke off may have been granted without our knowing the ticket. Where we write, its pages stay
        withheld until this pairing's mapping is gone, so the pairing is not used any longer."""
        answered = isinstance(error, grpc.aio.AioRpcError) and error.code() not in NO_ANSWER
        timed_out_there = (
            isinstance(error, grpc.aio.AioRpcError) and error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and not waited_out
        )
        if not answered and not timed_out_there and pairing.transport in SENDER_WRITES:
            self._acquaintance.drop(pairing)

    async def _freshen(self, lease: Lease) -> None:
        """After a long wait in line, this worker's deadline, which counts from when it asked, is near or over: count anew. The
        lease is not kept yet, for it would be taken for one that ran out while Renew is on its way."""
        if lease.deadline - self._clock() > lease.length_seconds * SAFE_SHARE / 2:
            return
        try:
            if await self.leases.renew([lease]):
                raise Unavailable(f"the lease at decode worker {lease.pairing.worker_id} was ended there")
        except BaseException as error:
            self.leases.give_back(lease)
            if isinstance(error, grpc.aio.AioRpcError):
                raise peer_error(error, address=self.address) from None
            raise
