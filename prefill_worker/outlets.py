"""Outlets: where the engine thread puts complete pages, by transport."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from common.core import Req
from common.engine.handle import Emit
from common.engine.peer_store import PeerStore
from common.errors import Unavailable
from common.handoff.base import page_checksum
from common.handoff.shm_sender import ShmSender
from prefill_worker.commands import ClosePool, ForOutlets, OpenPool, SlotsFree
from prefill_worker.events import Page, PagesReady
from prefill_worker.job import Job
from prefill_worker.slots import Slots


class Outlets:
    """Engine thread only. shm: copies pages into the decode worker's mapped pool; grpc: announces them to the event loop."""

    def __init__(
        self, *, page_view: Callable[[int], memoryview], emit: Emit, clock: Callable[[], float], slots: Slots | None = None
    ) -> None:
        """page_view: the bytes of one of this worker's pages. slots: what pages for grpc pass through, if the event loop cannot
        read them where they are."""
        self._page_view = page_view
        self._emit = emit
        self._clock = clock
        self._slots = slots
        self._mapped: dict[str, ShmSender] = {}

    def handle(self, command: ForOutlets) -> None:
        match command:
            case OpenPool():
                self._open(command)
            case ClosePool():
                self._close(command.pair_id)
            case SlotsFree():
                assert self._slots is not None, "pages are not announced by slot"
                self._slots.free(command.key, command.slots)

    def _open(self, command: OpenPool) -> None:
        sender = ShmSender(command.descriptor, pool_bytes=command.pool_bytes, page_bytes=command.page_bytes)
        self._mapped[command.pair_id] = sender

    def _close(self, pair_id: str) -> None:
        if (sender := self._mapped.pop(pair_id, None)) is not None:
            sender.close()

    def close_all(self) -> None:
        for pair_id in list(self._mapped):
            self._close(pair_id)

    def peer_stores(self, jobs: Sequence[Job]) -> dict[Req, PeerStore]:
        """Where the kernels that compute these jobs store their KV as well. Nowhere by shm and grpc, which send pages that have
        landed."""
        return {}

    def put(self, job: Job, pages: list[Page]) -> None:
        """Sends complete pages on. Raises Unavailable when the lease is over or the pool is not mapped (any more)."""
        assert job.destination is not None
        if not pages:
            return
        if job.destination.transport == "grpc":
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

    def forget(self, job: Job) -> None:
        """None of this job's pages is to be sent any more, and none is being read."""
        if self._slots is not None:
            self._slots.forget(job.key)

    def check(self) -> None:
        if self._slots is not None:
            self._slots.check()

    def _copy(self, job: Job, page: Page, sender: ShmSender) -> None:
        assert job.destination is not None
        if self._clock() >= job.deadline:  # Not even one page late: the decode worker may give the page to somebody else.
            raise Unavailable("the decode worker's lease ran out during the copy")
        source = self._page_view(page.page_id)
        sender.write(job.destination.page_ids[page.page_index], source)
        if job.destination.verify:
            job.page_crc32.append(page_checksum(source))
