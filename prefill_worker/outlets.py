"""Outlets: where the engine thread puts complete pages, by transport."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from common.core import Req
from common.engine.handle import Emit
from common.engine.kv_pages import KvPages
from common.engine.peer_store import PeerStore
from common.errors import Unavailable
from common.handoff.base import page_checksum
from common.handoff.shm_sender import ShmSender
from common.work import TokenOut
from prefill_worker.commands import AwaitPoolEnd, ClosePool, ForOutlets, OpenCudaPool, OpenPool, SlotsFree
from prefill_worker.cuda_pools import CudaPools
from prefill_worker.events import Page, PagesReady
from prefill_worker.job import Job
from prefill_worker.slots import Slots

if TYPE_CHECKING:
    from prefill_worker.cuda_tools import CudaTools


class Outlets:
    """Engine thread only. shm: copies pages into the decode worker's mapped pool; cuda_ipc: the kernels store them there; grpc,
    sim: announces them to the event loop."""

    def __init__(
        self,
        pool: KvPages,
        *,
        emit: Emit,
        clock: Callable[[], float],
        slots: Slots | None = None,
        cuda: CudaTools | None = None,
    ) -> None:
        """pool: this worker's. slots: what pages for grpc pass through, if the event loop cannot read them where they are. cuda:
        None where there is no storing into GPUs."""
        self._pool = pool
        self._emit = emit
        self._clock = clock
        self._slots = slots
        self._mapped: dict[str, ShmSender] = {}
        self._cuda = CudaPools(cuda, pool=pool, emit=emit, clock=clock)

    def handle(self, command: ForOutlets, call_id: int | None) -> object:
        match command:
            case OpenPool():
                sender = ShmSender(command.descriptor, pool_bytes=command.pool_bytes, page_bytes=command.page_bytes)
                self._mapped[command.pair_id] = sender
            case OpenCudaPool():
                self._cuda.open(command)
            case ClosePool():
                self._close(command.pair_id)
                self._cuda.close(command.pair_id)
            case AwaitPoolEnd():
                assert call_id is not None, "somebody must wait"
                return self._cuda.await_end(command.pair_id, call_id)
            case SlotsFree():
                assert self._slots is not None, "pages are not announced by slot"
                self._slots.free(command.key, command.slots)
            case _:
                raise TypeError(f"unknown command {command!r}")
        return None

    def abandon(self, call_id: int) -> bool:
        """False: the call was none of handle()'s."""
        return self._cuda.abandon(call_id)

    def tick(self) -> None:
        self._cuda.poll()

    def close_all(self) -> None:
        for pair_id in list(self._mapped):
            self._close(pair_id)
        self._cuda.close_all()

    def put(self, job: Job, pages: list[Page]) -> None:
        """Sends complete pages on. Raises Unavailable when the lease is over or the pool is not mapped (any more)."""
        assert job.destination is not None
        if job.destination.transport == "cuda_ipc":
            self._cuda.put(job, pages)
            return
        if not pages:
            return
        if job.destination.transport in ("grpc", "sim"):
            if self._slots is None:
                self._emit(PagesReady(job.key, tuple(pages)))
            else:
                self._slots.put(job.key, pages)
            return
        sender = self._mapped.get(job.destination.pair_id)
        if sender is None:
            raise Unavailable("the decode worker's pool is not mapped any more")
        for page in pages:
            self._copy(job, page, sender)

    def peer_stores(self, jobs: Sequence[Job]) -> dict[Req, PeerStore]:
        """Where the kernels that compute these jobs store their KV as well. Nowhere by shm and grpc, which send pages that have
        landed. put() has been called for each job before."""
        found = {job.req: self._cuda.store(job) for job in jobs if _is_stored(job)}
        return {req: store for req, store in found.items() if store is not None}

    def commit(self, job: Job, tokens: Sequence[TokenOut]) -> None:
        """The whole prompt is computed and sent: lets the decode worker begin, if there is a quick way to tell it."""
        if _is_stored(job):
            self._cuda.commit(job, tokens)

    def settle(self, job: Job) -> None:
        """After this nothing is written to the job's destination."""
        if _is_stored(job):
            self._cuda.settle(job)

    def forget(self, job: Job) -> None:
        """None of this job's pages is to be sent any more, and none is being read."""
        if self._slots is not None:
            self._slots.forget(job.key)

    def check(self) -> None:
        if self._slots is not None:
            self._slots.check()

    def _close(self, pair_id: str) -> None:
        if (sender := self._mapped.pop(pair_id, None)) is not None:
            sender.close()

    def _copy(self, job: Job, page: Page, sender: ShmSender) -> None:
        assert job.destination is not None
        if self._clock() >= job.deadline:  # Not even one page late: the decode worker may give the page to somebody else.
            raise Unavailable("the decode worker's lease ran out during the copy")
        source = self._pool.page_view(page.page_id)
        sender.write(job.destination.page_ids[page.page_index], source)
        if job.destination.verify:
            job.page_crc32.append(page_checksum(source))


def _is_stored(job: Job) -> bool:
    return job.destination is not None and job.destination.transport == "cuda_ipc"
