"""CudaPools: the decode workers' pools that this engine's GPU stores into (transport cuda_ipc).

How a ticket's pages get there, on the token axis of one request:

    0            cached at admission                     input_len
    | prefix cache of P | computed: each chunk's kernels store every token here and there |
    0        prefix_len
    | D has  | copied in bulk | stored by the kernels                                     |
             '- before the first chunk, on the same stream -'

With prefix_len behind what P has cached nothing is copied, and tokens before prefix_len are computed but not stored there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from common.engine.handle import DEFERRED, Emit, Reply
from common.engine.kv_pages import KvPages
from common.engine.peer_store import PeerStore
from common.errors import FailedPrecondition, Unavailable
from common.handoff.base import page_checksum, tokens_of
from common.handoff.cuda_driver import CudaError
from common.handoff.cuda_ipc_link import CudaIpcLink
from common.logs import about
from common.rpc.gen.pdserve.v1 import decode_pb2
from common.wire import token_to_pb
from common.work import TokenOut
from prefill_worker.commands import Destination, OpenCudaPool
from prefill_worker.events import Page
from prefill_worker.job import Job
from prefill_worker.states import State

if TYPE_CHECKING:
    from prefill_worker.cuda_tools import CudaTools

log = logging.getLogger(__name__)


class CudaPools:
    """Engine thread only. Where a call of the tools fails the context is lost, and CudaError ends the engine."""

    def __init__(self, tools: CudaTools | None, *, pool: KvPages, emit: Emit, clock: Callable[[], float]) -> None:
        """tools: None: every open is refused. pool: this worker's."""
        self._tools = tools
        self._pool = pool
        self._emit = emit
        self._clock = clock
        self._links: dict[str, CudaIpcLink] = {}
        self._waiting: dict[int, str] = {}
        """Calls that wait for the end of the decode worker behind a pairing."""

    def open(self, command: OpenCudaPool) -> None:
        """Raises FailedPrecondition."""
        if self._tools is None:
            raise FailedPrecondition("this prefill worker cannot store into GPUs")
        if command.page_bytes != self._pool.page_bytes or command.export.pool_bytes % command.page_bytes:
            raise FailedPrecondition(f"a pool of {command.export.pool_bytes} bytes is not whole pages of {self._pool.page_bytes}")
        self._links[command.pair_id] = CudaIpcLink.open(
            command.export, socket_name=command.socket_name, pair_id=command.pair_id, driver=self._tools.driver
        )

    def close(self, pair_id: str) -> None:
        """No write of this pairing is under way or possible any more; an unknown one is fine."""
        self._waiting = {call: pair for call, pair in self._waiting.items() if pair != pair_id}
        if (link := self._links.pop(pair_id, None)) is not None:
            link.close()

    def close_all(self) -> None:
        """At the engine's end, also one by a CUDA error: what can't be unmapped ends with the process."""
        for pair_id in list(self._links):
            try:
                self.close(pair_id)
            except CudaError as error:
                log.warning("a decode worker's pool is unmapped by this process's end: %s", error)

    def await_end(self, pair_id: str, call_id: int) -> object:
        if pair_id not in self._links:
            return None
        self._waiting[call_id] = pair_id
        return DEFERRED

    def abandon(self, call_id: int) -> bool:
        """False: the call is none of these."""
        return self._waiting.pop(call_id, None) is not None

    def poll(self) -> None:
        """Looks which decode workers have gone."""
        for call_id, pair_id in list(self._waiting.items()):
            if self._links[pair_id].is_peer_gone():
                del self._waiting[call_id]
                self._emit(Reply(call_id))

    def put(self, job: Job, pages: list[Page]) -> None:
        """Counts pages as sent that the kernels have stored there, and copies those that none will. Raises Unavailable when the
        lease is over or the pool is not mapped (any more), FailedPrecondition on pages that the pool does not have."""
        destination = _destination(job)
        link = self._link(destination)
        if not job.has_started:
            self._check_pages(destination, link)
        if copied := [page for page in pages if self._is_cached(job, page)]:
            assert self._tools is not None
            if self._clock() >= job.deadline:
                raise Unavailable("the decode worker's lease ran out before the copy")
            dest_pages = [destination.page_ids[page.page_index] for page in copied]
            self._tools.copy_pages([page.page_id for page in copied], link.base, dest_pages)
        if destination.verify:
            job.page_crc32 += [self._checksum(job, page) for page in pages]

    def store(self, job: Job) -> PeerStore | None:
        """Where the next chunk's kernels store this job's tokens besides this worker's own pool. put() comes before it."""
        destination = _destination(job)
        if not destination.page_ids:
            return None
        return PeerStore(self._link(destination).base, destination.page_ids, destination.prefix_len)

    def commit(self, job: Job, tokens: Sequence[TokenOut]) -> None:
        """Hands the request over ahead of the event loop's Commit, if every completion is to be run."""
        destination = _destination(job)
        if not destination.ticket or any(token.finish is not None for token in tokens):
            return
        request = decode_pb2.CommitRequest(
            ticket=destination.ticket,
            first_tokens=map(token_to_pb, tokens),
            pages_sent=job.sent,
            page_crc32=job.page_crc32,
            computed_at_ns=int(self._clock() * 1e9),
        )
        if not self._link(destination).send(request.SerializeToString()):
            extra = about(job.req.request_id, uid=job.req.uid, attempt=job.req.attempt)
            log.info("a commit was not sent ahead: it is too long, or the decode worker does not read", extra=extra)

    def settle(self, job: Job) -> None:
        """After this nothing that was queued for the job writes to its destination."""
        if job.state is State.COMPUTING and _destination(job).pair_id in self._links:
            assert self._tools is not None
            self._tools.driver.synchronize()

    def _link(self, destination: Destination) -> CudaIpcLink:
        if (link := self._links.get(destination.pair_id)) is None:
            raise Unavailable("the decode worker's pool is not mapped any more")
        return link

    def _check_pages(self, destination: Destination, link: CudaIpcLink) -> None:
        # A store outside of the mapping would cost this process its context, and with it everybody's requests.
        there = link.pool_bytes // self._pool.page_bytes
        if any(not 0 <= page < there for page in destination.page_ids):
            raise FailedPrecondition(f"the ticket names pages that a pool of {there} does not have")

    def _is_cached(self, job: Job, page: Page) -> bool:
        cached_len = job.cached_tokens if job.has_started else job.req.cached_len
        return self._tokens(job, page).stop <= cached_len

    def _tokens(self, job: Job, page: Page) -> range:
        prefix_len = _destination(job).prefix_len
        return tokens_of(page.page_index, input_len=job.input_len, prefix_len=prefix_len, page_size=self._pool.page_size)

    def _checksum(self, job: Job, page: Page) -> int:
        return page_checksum(self._pool.read_page(page.page_id, tokens=len(self._tokens(job, page))))


def _destination(job: Job) -> Destination:
    assert job.destination is not None
    return job.destination
