"""cuda_ipc page by page between processes on real GPUs: weights from safetensors, every length, prefixes, chunks."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flashinfer", reason="flashinfer is not installed")

from common.engine.config import EngineConfig
from common.engine.kv_pool import KVPool
from tests.helpers.gpu_pool import exported
from tests.helpers.handoff_pages import check_all, handoffs
from tests.helpers.page_keeper import build_gpu_keeper
from tests.helpers.tiny_model import make_tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

PAGE_SIZE = 64
SHAPE: dict[str, Any] = {"hidden": 256, "heads": 8, "kv_heads": 2, "head_dim": 64, "layers": 3, "vocab": 700}
LENGTHS = (1, 63, 64, 65, 511, 2048, 8192)
CHUNK_TOKENS = 3000
"""No whole pages; longer than any captured step, so that both ways to launch a chunk store into the peer."""


@pytest.mark.parametrize("gpus", [1, 2], ids=["one-gpu", "two-gpus"])
async def test_every_page_arrives_as_it_was_computed_and_no_other_byte_changes(tmp_path: Path, gpus: int) -> None:
    await check(tmp_path, gpus, LENGTHS, dtype=torch.bfloat16)


async def test_so_it_does_in_float16(tmp_path: Path) -> None:
    """With torch's attention, which needs no kernel compiled for it."""
    await check(tmp_path, 1, (1, 63, 64, 65, 511), dtype=torch.float16, prefill_attention="torch")


async def check(folder: Path, gpus: int, lengths: tuple[int, ...], *, dtype: torch.dtype, **config: Any) -> None:
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"needs {gpus} CUDA devices, there are {torch.cuda.device_count()}")
    engine = EngineConfig(
        model=make_tiny_model(folder, dtype=dtype, max_context=16384, shards=2, **SHAPE),
        device="cuda:0",
        dtype=str(dtype).removeprefix("torch."),
        page_size=PAGE_SIZE,
        pool_pages=500,
        chunk_tokens=CHUNK_TOKENS,
        table_rows=8,
        **config,
    )
    device = f"cuda:{gpus - 1}"
    torch.cuda.set_device(device)
    geometry = {"num_layers": SHAPE["layers"], "num_kv_heads": SHAPE["kv_heads"], "head_dim": SHAPE["head_dim"]}
    pool = KVPool(200, page_size=PAGE_SIZE, dtype=dtype, device=device, **geometry)
    async with handoffs(partial(build_gpu_keeper, engine), pool, exported(pool)) as pair:
        await check_all(pair, lengths, page_size=PAGE_SIZE, vocab=SHAPE["vocab"])
