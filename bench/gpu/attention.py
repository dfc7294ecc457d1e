"""Decode attention by XQA: how far sequences should be split, at a context of 1024 over pages dealt out at random."""

from __future__ import annotations

from functools import partial

import torch

from bench.gpu.clock import graph_us
from common.engine.cuda.attention_choice import WORKSPACE_BYTES
from common.engine.cuda.attention_kernels import Geometry, XqaDecode

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
PROGRAMS_PER_SM = (0.5, 1, 1.5, 2, 3, 4, 6, 8)
CONTEXT = 1024
TABLE_PAGES = 128
PAGE_SIZE = 64
LAYERS = 8
KV_HEADS, HEAD_DIM = 8, 128
BYTES_PER_SECOND = 4.2e12


def compare() -> None:
    """Prints microseconds per layer for each number of splits that differs; 1 program per SM is FlashInfer's own choice."""
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
    for heads in (32, 16):
        geometry = Geometry(
            num_heads=heads, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, page_size=PAGE_SIZE, dtype=torch.bfloat16,
            device=torch.device("cuda"),
        )  # fmt: skip
        for batch in BATCH_SIZES:
            floor = batch * CONTEXT * 4 * KV_HEADS * HEAD_DIM / BYTES_PER_SECOND * 1e6
            row = [f"XQA {heads:2} heads, batch {batch:3}, floor {floor:5.1f} us"]
            seen: set[int] = set()
            for share in PROGRAMS_PER_SM:
                splits = max(1, int(sms * share) // (batch * KV_HEADS))
                if splits not in seen:
                    seen.add(splits)
                    us = _us(XqaDecode(geometry, workspace, programs=splits * batch * KV_HEADS), geometry, batch)
                    row.append(f"{share:g} per SM ({splits}): {us:.1f}")
            print(" | ".join(row), flush=True)


def _us(kernel: XqaDecode, geometry: Geometry, batch: int) -> float:
    """Over so many pages that the cache holds few of those asked for again."""
    pages, rounds = CONTEXT // PAGE_SIZE, max(1, 8 // batch)
    used = rounds * batch * pages
    pool = torch.empty(used + 64, LAYERS, 2, PAGE_SIZE, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16, device="cuda").normal_()
    tables = torch.zeros(rounds, batch, TABLE_PAGES, dtype=torch.int32, device="cuda")
    tables[:, :, :pages] = torch.randperm(len(pool), device="cuda")[:used].int().view(rounds, batch, pages)
    lengths = torch.full((batch,), CONTEXT, dtype=torch.int32, device="cuda")
    q = torch.randn(batch, geometry.num_heads, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    out = torch.empty_like(q)
    return graph_us(
        [
            partial(kernel.run, q, pool[:, layer, 0], pool[:, layer, 1], table, lengths, out)
            for table in tables
            for layer in range(LAYERS)
        ]
    )
