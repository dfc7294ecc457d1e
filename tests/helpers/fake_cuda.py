"""FakeCuda: a CudaDriver whose device memory is host memory that processes share, so that addresses and mappings are real."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from common.core import Batch, Req
from common.engine.kv_pool import KVPool
from common.engine.peer_store import PeerStore
from common.engine.runner import Pending, Sampled
from common.handoff.cuda_driver import HANDLE_BYTES, CudaError
from common.handoff.cuda_ipc import NONCE_BYTES, PoolExport, export_pool
from common.handoff.pool_memory import PoolMemory
from prefill_worker.cuda_tools import CudaTools
from tests.helpers.fake_runner import FakeRunner


class FakeCuda:
    """fails: calls by name that CUDA refuses. is_lost: every call fails, as after a kernel's fault. calls: by name, in order."""

    def __init__(self) -> None:
        self.fails: set[str] = set()
        self.is_lost = False
        self.calls: list[str] = []
        self._allocations: dict[int, tuple[int, int]] = {}
        """Own allocations: base to (bytes, descriptor)."""
        self._mapped: dict[int, mmap.mmap] = {}

    def adopt(self, memory: PoolMemory) -> int:
        """Makes it an allocation of this device; its address."""
        address = address_of(memory.view)
        self._allocations[address] = (memory.size, memory.descriptor)
        return address

    @property
    def num_mapped(self) -> int:
        return len(self._mapped)

    def device_uuid(self) -> bytes:
        self._begin("device_uuid")
        return b"fake GPU".ljust(16, b".")

    def allocation_of(self, address: int) -> tuple[int, int]:
        self._begin("allocation_of")
        for base, (size, _) in self._allocations.items():
            if base <= address < base + size:
                return base, size
        raise CudaError("no such allocation")

    def ipc_handle(self, base: int) -> bytes:
        self._begin("ipc_handle")
        return f"/proc/{os.getpid()}/fd/{self._allocations[base][1]}".encode().ljust(HANDLE_BYTES)

    def open_ipc(self, handle: bytes) -> int:
        self._begin("open_ipc")
        try:
            descriptor = os.open(handle.decode().strip(), os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise CudaError(f"open_ipc failed: {error}") from error
        mapping = mmap.mmap(descriptor, 0)
        os.close(descriptor)
        base = address_of(mapping)
        self._mapped[base] = mapping
        return base

    def close_ipc(self, base: int) -> None:
        self._begin("close_ipc")
        del self._mapped[base]

    def check_access(self, address: int) -> None:
        self._begin("check_access")

    def read(self, address: int, size: int) -> bytes:
        self._begin("read")
        return ctypes.string_at(address, size)

    def write(self, address: int, data: bytes) -> None:
        self._begin("write")
        ctypes.memmove(address, data, len(data))

    def synchronize(self) -> None:
        self._begin("synchronize")

    def _begin(self, name: str) -> None:
        self.calls.append(name)
        if self.is_lost or name in self.fails:
            raise CudaError(f"{name} failed: CUDA_ERROR_FAKE")


def address_of(memory: mmap.mmap | memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def cuda_pool(cuda: FakeCuda, *, num_pages: int, page_bytes: int) -> tuple[PoolMemory, PoolExport]:
    """A pool in cuda's memory, with room for a nonce behind it."""
    memory = PoolMemory(num_pages + -(-NONCE_BYTES // page_bytes), page_bytes)
    memory.num_pages = num_pages
    address = cuda.adopt(memory)
    size = num_pages * page_bytes
    export = export_pool(cuda, pool_address=address, pool_bytes=size, nonce_address=address + size)
    return memory, export


def cuda_tools(cuda: FakeCuda, pool: KVPool, copied: list[int]) -> CudaTools:
    """copied: notes the pages, of the destination, that were copied in bulk."""

    def copy_pages(source_pages: Sequence[int], base: int, dest_pages: Sequence[int]) -> None:
        for source, dest in zip(source_pages, dest_pages, strict=True):
            ctypes.memmove(base + dest * pool.page_bytes, bytes(pool.page_view(source)), pool.page_bytes)
            copied.append(dest)

    return CudaTools(cuda, copy_pages)


@dataclass
class _Flight:
    """A step that stores elsewhere too, when it lands."""

    step: Pending
    store: Callable[[], None]

    def result(self) -> list[list[Sampled]]:
        tokens = self.step.result()
        self.store()
        return tokens


class StoringRunner(FakeRunner):
    """A FakeRunner on a FakeCuda: it stores every computed token's K and V, and nothing else, in peers' pools too."""

    def launch(self, batch: Batch, stores: Mapping[Req, PeerStore] | None = None) -> Pending:
        work = []
        for req, store in (stores or {}).items():
            assert req in batch.reqs
            locations = self.page_table.tensor[req.table_idx, : req.device_len].tolist()
            work.append((store, locations, range(max(req.cached_len, store.prefix_len), req.device_len)))

        def store_all() -> None:
            for store, locations, positions in work:
                for position in positions:
                    self._store(locations[position], store, position - store.prefix_len)

        return _Flight(super().launch(batch), store_all)

    def _store(self, location: int, store: PeerStore, place: int) -> None:
        size = self.pool.page_size
        source = self.pool.page_view(location // size)
        dest = store.base + store.page_ids[place // size] * self.pool.page_bytes
        for first_slot in (0, size):  # One layer, one head, one float each: K of all slots, then V.
            offset = (first_slot + location % size) * 4
            ctypes.memmove(dest + (first_slot + place % size) * 4, bytes(source[offset : offset + 4]), 4)
