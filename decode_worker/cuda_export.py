"""The decode worker's KV pool, made known to prefill workers on the same host."""

from __future__ import annotations

import logging

from common.engine.kv_pool import KVPool
from common.handoff.cuda_driver import CudaBindings, CudaDriver, CudaError
from common.handoff.cuda_ipc import PoolExport, export_pool

log = logging.getLogger(__name__)


def export_kv_pool(pool: KVPool, driver: CudaDriver | None = None) -> PoolExport | None:
    """None if the pool is not on a GPU or CUDA will not export it (then cuda_ipc is not offered). Call it in the engine's thread.

    driver: of the pool's GPU, if it is not to be made."""
    device = pool.tensor.device
    if device.type != "cuda":
        return None
    try:
        return export_pool(
            driver or CudaBindings(device.index or 0),
            pool_address=pool.tensor.data_ptr(),
            pool_bytes=pool.num_pages * pool.page_bytes,
            nonce_address=pool.nonce_address,
        )
    except (CudaError, ImportError) as error:
        log.warning("cuda_ipc is not offered: %s", error)
        return None
