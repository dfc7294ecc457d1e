"""Pools in real GPU memory, whose pages tell where they came from; and a decode worker's process that only owns one.

python -m tests.helpers.gpu_pool DEVICE    prints one JSON line: export (cuda_writer's), socket, pair_id; then waits for its end
"""

from __future__ import annotations

import asyncio
import json
import sys

import torch

from common.engine.kv_pool import KVPool
from common.handoff.cuda_ipc import PoolExport
from common.handoff.cuda_ipc_receiver import CudaIpcReceiver
from decode_worker.cuda_export import export_kv_pool
from tests.helpers.cuda_writer import as_argument

NUM_PAGES = 64


def make_pool(device: str) -> KVPool:
    """NUM_PAGES of 256 KiB, all zero; on the device that is current from now on."""
    torch.cuda.set_device(device)
    return KVPool(
        NUM_PAGES, num_layers=32, page_size=16, num_kv_heads=2, head_dim=64, dtype=torch.bfloat16, device=device
    )  # fmt: skip


def words_of(pool: KVPool) -> torch.Tensor:
    """[pages, words] int64, a view."""
    return pool.tensor.view(pool.num_pages, -1).view(torch.int64)


def fill(pool: KVPool) -> None:
    """No word of it is like another's."""
    words = words_of(pool)
    words.copy_(torch.arange(1, words.numel() + 1, device=words.device).view_as(words))


def exported(pool: KVPool) -> PoolExport:
    torch.cuda.synchronize()
    export = export_kv_pool(pool)
    assert export is not None, "CUDA does not export it; the log says why"
    return export


async def _main(device: str) -> None:
    export = exported(make_pool(device))
    receiver = CudaIpcReceiver(
        export.pool_bytes, is_known="pair".__eq__, on_gone=lambda pair_id: None, on_line=lambda pair_id, line: line.close()
    )
    receiver.start()
    await asyncio.sleep(0)
    print(json.dumps({"export": as_argument(export), "socket": receiver.socket_name, "pair_id": "pair"}), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1]))
