"""A KV pool in GPU memory, exported by one process and mapped by another of the same host.

    allocation (one cudaMalloc)     0         offset                      nonce_offset
                                    | other   | pool: page 0, page 1, ... | nonce | other |

The nonce is 32 random bytes that the owner put behind the pool. Who reads the same bytes through its mapping has the very memory
that is meant, to its end, so is on the same host, and can reach it from its own GPU.

Order of memory. The sender's host has waited for an event behind its storing kernels before it says Commit. A kernel that has
completed has performed its stores at system scope, also those to a peer's memory; that memory's point of coherence is the L2
of the GPU that owns it, where they have arrived. The receiver launches its reading kernels after it got the message, and a kernel
starts with none of an earlier one's lines in its L1. So Commit needs no further fence on either side.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Final

from common.errors import FailedPrecondition
from common.handoff.cuda_driver import HANDLE_BYTES, UUID_BYTES, CudaDriver, CudaError

NONCE_BYTES: Final = 32


@dataclass(frozen=True)
class PoolExport:
    """See CudaPool in decode.proto. Offsets are in the allocation. Raises ValueError on what can't be one."""

    handle: bytes
    offset: int
    pool_bytes: int
    device_uuid: bytes
    nonce: bytes
    nonce_offset: int

    def __post_init__(self) -> None:
        for name, length in (("handle", HANDLE_BYTES), ("device_uuid", UUID_BYTES), ("nonce", NONCE_BYTES)):
            if len(getattr(self, name)) != length:
                raise ValueError(f"{name} must be {length} bytes, got {len(getattr(self, name))}")
        if self.offset < 0 or self.pool_bytes < 1 or self.nonce_offset < self.offset + self.pool_bytes:
            raise ValueError(f"a pool of {self.pool_bytes} bytes at {self.offset} with its nonce at {self.nonce_offset} is none")


def export_pool(driver: CudaDriver, *, pool_address: int, pool_bytes: int, nonce_address: int) -> PoolExport:
    """Writes a new nonce and makes the pool known to other processes. nonce_address: NONCE_BYTES behind the pool, in its
    allocation, that nothing else uses. Raises CudaError if the allocation cannot be exported."""
    base, size = driver.allocation_of(pool_address)
    nonce = secrets.token_bytes(NONCE_BYTES)
    export = PoolExport(
        handle=driver.ipc_handle(base),
        offset=pool_address - base,
        pool_bytes=pool_bytes,
        device_uuid=driver.device_uuid(),
        nonce=nonce,
        nonce_offset=nonce_address - base,
    )
    if export.nonce_offset + NONCE_BYTES > size:
        raise CudaError(f"the nonce lies at byte {export.nonce_offset} of an allocation of {size}: the pool is not in one")
    driver.synchronize()  # What zeroes the allocation may still be queued, on another stream than the write's.
    driver.write(nonce_address, nonce)
    return export


class MappedPool:
    """Another process's pool as this process's GPU sees it. base: the pool's first byte. Engine thread only."""

    def __init__(self, driver: CudaDriver, *, allocation: int, offset: int, pool_bytes: int) -> None:
        self.base = allocation + offset
        self.pool_bytes = pool_bytes
        self._driver = driver
        self._allocation = allocation

    def close(self) -> None:
        """Waits for this process's kernels, then unmaps: no write is possible any more. Raises CudaError if that is not sure."""
        self._driver.synchronize()
        self._driver.close_ipc(self._allocation)


def open_pool(export: PoolExport, driver: CudaDriver) -> MappedPool:
    """Maps it for the driver's device. Raises FailedPrecondition if that cannot be, or if what was mapped is not that pool, and
    CudaError if this process's context is lost."""
    try:
        allocation = driver.open_ipc(export.handle)
        try:
            _check(export, driver, allocation)
        except BaseException:
            driver.close_ipc(allocation)
            raise
    except CudaError as error:
        driver.synchronize()  # Raises if it was no refusal but an earlier kernel's fault that came to light here.
        raise FailedPrecondition(f"the decode worker's GPU memory cannot be mapped: {error}") from error
    return MappedPool(driver, allocation=allocation, offset=export.offset, pool_bytes=export.pool_bytes)


def _check(export: PoolExport, driver: CudaDriver, allocation: int) -> None:
    driver.check_access(allocation + export.offset)
    if driver.read(allocation + export.nonce_offset, NONCE_BYTES) != export.nonce:
        raise FailedPrecondition("what was mapped is not the decode worker's pool: its nonce differs")
