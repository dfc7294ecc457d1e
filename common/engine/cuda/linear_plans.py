"""Which products small_linear computes, and by which plan: what was measured best on an H200 (bench/gpu/linear.py), where it
beats cuBLAS with the small kernels around it. docs/performance.md has the figures.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from common.engine.cuda.small_linear import Plan

PLANNED_TOKENS = 32
"""Products of more tokens are cuBLAS's."""
SMALL_ELEMENTS = 8 << 20
"""Of a weight that is read in a few microseconds: the launches around it count as much."""
LT_TOKENS = range(PLANNED_TOKENS + 1, 65)
"""For which cuBLASLt was faster than cuBLAS (8B, whole steps)."""


@contextmanager
def fastest_blas(tokens: int) -> Iterator[None]:
    """Inside the block, products that small_linear leaves to a library are cuBLASLt's where that was faster, else cuBLAS's. What
    is captured inside stays so."""
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library("cublaslt" if tokens in LT_TOKENS else "cublas")
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(before)


def best_plan(tokens: int, weight: torch.Tensor, *, gated: bool = False) -> Plan | None:
    """None: cuBLAS, as ever in float32, which small_linear does not compute."""
    rows, depth = weight.shape
    if tokens > PLANNED_TOKENS or weight.dtype == torch.float32:
        return None
    if rows * depth <= SMALL_ELEMENTS:
        return _small(tokens, rows, depth, gated=gated)
    if tokens == 1:
        return _fma(rows=4, warps=8 if rows > depth else 4)
    if gated or rows > 8192:
        return _dot(stages=4)
    return _dot(stages=6, split=2 if rows <= depth else 1)


def _small(tokens: int, rows: int, depth: int, *, gated: bool) -> Plan:
    if tokens <= 4:
        if depth <= 1024:
            return _fma(rows=8 if tokens == 1 else 4, warps=2, prefetch=True)
        return _fma(rows=4, warps=8 if tokens <= 2 else 4)
    if gated:
        return _dot(stages=3)
    return _dot(stages=4, split=min(2, max(1, depth // 512)) if rows > depth else min(8, max(1, depth // 256)))


def _fma(*, rows: int, warps: int, prefetch: bool = False) -> Plan:
    return Plan(dot=False, rows=rows, depth=256 * warps, warps=warps, stages=1, prefetch=prefetch)


def _dot(*, stages: int, split: int = 1) -> Plan:
    return Plan(dot=True, rows=64, depth=128, warps=4, stages=stages, split=split, prefetch=True)
