"""Leases: the tickets this worker holds at one decode worker. Renewed while in use, given back when not."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable
from typing import Any, Final

import grpc

from common.errors import Unavailable
from common.rpc.channels import is_silence
from common.rpc.gen.pdserve.v1 import decode_pb2, decode_pb2_grpc
from prefill_worker.commands import Extend
from prefill_worker.lease import SAFE_SHARE, Lease
from prefill_worker.pairing import Pairing

RENEW_SHARE: Final = 1 / 3
"""Of a lease, between two renewals."""
MAX_RENEW_SECONDS: Final = 0.5
"""And never more than this, so that a decode worker that has fallen silent is known to have while prompts for it are computed."""
SECOND_OPINION_SECONDS: Final = 2.0
"""How long a decode worker may take to answer that seemed silent while this process stood still."""
RELEASE_SECONDS: Final = 2.0
"""How long one Release call may take."""
RELEASE_PATIENCE_SECONDS: Final = 120.0
"""How long Release is repeated before the whole pairing is closed instead, which gives everything back too."""

_log = logging.getLogger(__name__)


class Leases:
    """Event loop only; owns the tasks that renew and release."""

    def __init__(
        self,
        stub: decode_pb2_grpc.DecodeServiceStub,
        *,
        post: Callable[[Any], None],
        clock: Callable[[], float],
        stood_still: Callable[[], bool] = lambda: False,
    ) -> None:
        """post: takes commands for the engine. stood_still: see Terms."""
        self._stub = stub
        self._post = post
        self._clock = clock
        self._stood_still = stood_still
        self._kept: dict[str, Lease] = {}
        self._renewer: asyncio.Task[None] | None = None
        self._releases: set[asyncio.Task[None]] = set()

    @property
    def is_idle(self) -> bool:
        return not self._kept and not self._releases

    def keep(self, lease: Lease) -> None:
        """Renews it from now on."""
        self._kept[lease.ticket] = lease
        if self._renewer is None:
            self._renewer = asyncio.create_task(self._renew_kept(), name="renew leases")

    def let_go(self, lease: Lease) -> None:
        """The ticket has ended well (Commit)."""
        self._kept.pop(lease.ticket, None)
        lease.pairing.let_go()

    def give_back(self, lease: Lease, *, drained: bool = True) -> None:
        """The ticket is not needed. drained: nothing of it is being sent any more, or will be. Repeated until answered."""
        self.let_go(lease)
        task = asyncio.create_task(self._release(lease, drained=drained), name=f"release {lease.ticket}")
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    async def renew(self, leases: Iterable[Lease], *, longest_seconds: float = math.inf) -> set[str]:
        """One Renew for all of them. Returns the tickets that are lost; those that are kept are told. Raises what the call failed
        with."""
        leases = tuple(leases)
        sent = self._clock()
        timeout = min(longest_seconds, min(lease.length_seconds for lease in leases) * RENEW_SHARE)
        request = decode_pb2.RenewRequest(tickets=[lease.ticket for lease in leases])
        lost = set((await self._stub.Renew(request, timeout=timeout)).lost)
        for lease in leases:
            if lease.ticket not in lost:
                lease.deadline = max(lease.deadline, sent + SAFE_SHARE * lease.length_seconds)
            else:
                self._lose(lease, "was ended there")
        self._post(Extend({lease.key: lease.deadline for lease in leases if lease.ticket not in lost}))
        return lost

    def lose_all(self, pairing: Pairing) -> None:
        """The decode worker behind this pairing has ended."""
        for lease in [lease for lease in self._kept.values() if lease.pairing is pairing]:
            lease.is_committing = False
            self._lose(lease, "ended with that worker")

    async def close(self, *, patience_seconds: float) -> None:
        """Gives the releases under way that long."""
        if self._renewer is not None:
            self._renewer.cancel()
        if self._releases:
            await asyncio.wait(self._releases, timeout=patience_seconds)
        for task in self._releases:
            task.cancel()

    async def _renew_kept(self) -> None:
        try:
            await self._renew_until_none()
        except Exception:
            _log.exception("leases are not renewed any more")
            self._lose_all("was not renewed, by an internal error")  # At once: whoever holds one would wait until it is over.
        finally:
            self._renewer = None

    async def _renew_until_none(self) -> None:
        pause = self._interval()
        while self._kept:
            await asyncio.sleep(min(pause, max(0.01, self._first_deadline() - self._clock())))
            self._lose_overdue()
            if not self._kept:
                break
            pause = self._interval()
            try:
                await self._renew_all()
            except grpc.aio.AioRpcError as error:
                _log.warning("leases were not renewed: %s: %s", error.code().name, error.details())
                if is_silence(error):
                    self._lose_all("is of no use, for it is silent")
                pause /= 4

    async def _renew_all(self) -> None:
        try:
            await self.renew(self._kept.values())
        except grpc.aio.AioRpcError as error:
            if not (is_silence(error) and self._stood_still()):
                raise
            _log.info("this process stood still: its leases are renewed again before a decode worker is taken for silent")
            try:
                if kept := self._kept.values():
                    await self.renew(kept, longest_seconds=SECOND_OPINION_SECONDS)
            except grpc.aio.AioRpcError:
                raise error from None

    def _interval(self) -> float:
        shortest = min((lease.length_seconds for lease in self._kept.values()), default=1.0)
        return min(MAX_RENEW_SECONDS, shortest * RENEW_SHARE)

    def _first_deadline(self) -> float:
        return min(lease.deadline for lease in self._kept.values())

    def _lose_overdue(self) -> None:
        for lease in [lease for lease in self._kept.values() if self._clock() >= lease.deadline]:
            self._lose(lease, "ran out")

    def _lose_all(self, how: str) -> None:
        for lease in list(self._kept.values()):
            self._lose(lease, how)

    def _lose(self, lease: Lease, how: str) -> None:
        if lease.is_committing or self._kept.pop(lease.ticket, None) is None:
            return
        lease.on_lost(Unavailable(f"the lease at decode worker {lease.pairing.worker_id} {how}"))

    async def _release(self, lease: Lease, *, drained: bool) -> None:
        """Until the decode worker has heard it: a ticket written to by this worker keeps its pages withheld there until then."""
        request = decode_pb2.ReleaseRequest(ticket=lease.ticket, drained=drained)
        give_up, pause = self._clock() + RELEASE_PATIENCE_SECONDS, 0.05
        while not lease.pairing.is_gone:
            try:
                await self._stub.Release(request, timeout=RELEASE_SECONDS)
                return
            except grpc.aio.AioRpcError as error:
                if self._clock() >= give_up:
                    _log.warning(
                        "ticket %s was not released, closing the pairing: %s", lease.ticket, error.details(), extra=lease.extra
                    )
                    lease.pairing.retire()
                    return
            await asyncio.sleep(pause)
            pause = min(2 * pause, RELEASE_SECONDS)
