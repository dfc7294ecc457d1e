"""Staging: how pages of a pool that the event loop cannot address (on a GPU) get in and out of it for `grpc`.

    prefill   pool page --to_slot--> slot --(GrpcSender reads it)--> network
    decode    network --(GrpcReceiver writes it)--> slot --from_slot--> pool page

Slots are pages of a PoolMemory, which the event loop's side makes and both map. Only few are needed: a page is in one for as long
as it takes to send or receive it. Who has which slot is the prefill engine's business (prefill_worker/slots.py) and the decode
worker's event loop's (common/handoff/free_slots.py).
"""

from __future__ import annotations

from typing import Final

import torch

from common.engine.kv_pool import KVPool
from common.handoff.pool_memory import PoolMemory

STAGING_BYTES: Final = 256 << 20
MIN_SLOTS: Final = 8


def slots_for(page_bytes: int, *, pool_pages: int | None) -> int:
    """How many slots a worker has. pool_pages: None if that is not known yet."""
    wanted = max(MIN_SLOTS, STAGING_BYTES // page_bytes)
    return wanted if pool_pages is None else min(pool_pages, wanted)


class Staging:
    """Engine thread only. A copy is done when its function returns. It waits for nothing else that the device is doing, so the
    page must be complete, or nobody's but the caller's."""

    def __init__(self, memory: PoolMemory, pool: KVPool) -> None:
        assert memory.page_bytes == pool.page_bytes, f"slots of {memory.page_bytes} bytes for pages of {pool.page_bytes}"
        self.num_slots = memory.num_pages
        self._slots = torch.frombuffer(memory.view, dtype=torch.uint8).view(memory.num_pages, memory.page_bytes)
        self._pages = pool.tensor.flatten(1).view(torch.uint8)
        self._tokens_of_page = (2 * pool.tensor.shape[1], pool.page_size, -1)
        self._stream: torch.cuda.Stream | None = None
        if self._pages.is_cuda:
            _pin(self._slots)
            self._stream = torch.cuda.Stream(self._pages.device)

    def to_slot(self, page: int, slot: int) -> None:
        self._copy(self._slots[slot], self._pages[page])

    def from_slot(self, slot: int, page: int) -> None:
        self._copy(self._pages[page], self._slots[slot])

    def read_page(self, page: int, *, tokens: int) -> bytes:
        """See ReadPage."""
        copy = torch.empty(self._pages.shape[1], dtype=torch.uint8)
        self._copy(copy, self._pages[page])
        return copy.view(self._tokens_of_page)[:, :tokens].numpy().tobytes()

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if self._stream is None:
            target.copy_(source)
            return
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        self._stream.synchronize()


def _pin(slots: torch.Tensor) -> None:
    """Makes the memory one that the device copies from and to by itself; it stays so until the process ends."""
    runtime = torch.cuda.cudart()
    failed = runtime.cudaHostRegister(slots.data_ptr(), slots.numel(), 0)
    if int(failed) != 0:
        raise RuntimeError(f"cannot pin the {slots.numel()} bytes that pages pass through: CUDA error {int(failed)}")
