"""Which products small_linear computes, and by which plan: what was measured best on an H200 (bench/gpu/linear.py), where it
beats cuBLAS with the small kernels around it. docs/performance.md has the figures.
"""

from __future__ import annotations

import torch

from common.engine.cuda.experiments import of_environment
from common.engine.cuda.small_linear import Plan

MID_TOKENS = 64
SMALL_ELEMENTS = 8 << 20
"""Of a weight that is read in a few microseconds: the launches around it count as much."""


def best_plan(
    tokens: int, weight: torch.Tensor, *, gated: bool = False, folded: bool = False, is_normed: bool = False
) -> Plan | None:
    """None: cuBLAS, as ever in float32, which small_linear does not compute. A norm goes before it, folded: with its weight in W;
    is_normed: with one of its own."""
    rows, depth = weight.shape
    if weight.dtype == torch.float32:
        return None
    if rows * depth <= SMALL_ELEMENTS:
        if 16 < tokens <= MID_TOKENS and of_environment().mid and not is_normed:
            return _mid(rows, depth)
        return _small(tokens, rows, depth, gated=gated)
    if tokens == 1:
        return _fma(rows=4, warps=8 if rows > depth else 4)
    if tokens == 2 and rows * depth < 256 << 20:
        return _fma(rows=4 if gated or rows <= depth else 2, warps=4)
    if tokens <= 16 and rows <= depth:
        return _dot(rows=64, depth=128, warps=4, split=4)
    if tokens <= 16 and folded and of_environment().wide:
        return _dot(rows=64, depth=128, warps=4, split=4 if rows <= 8192 else 1)
    return None


def _small(tokens: int, rows: int, depth: int, *, gated: bool) -> Plan | None:
    if tokens <= 4 and depth <= 1024:
        return _fma(rows=8 if tokens == 1 else 4, warps=2, prefetch=True)
    if tokens <= 4:
        return _fma(rows=4, warps=8 if tokens <= 2 else 4)
    if tokens > 16:
        return None
    if gated:
        return _dot(rows=64, depth=128, warps=4, split=2, prefetch=True)
    if rows > depth:
        return Plan(dot=True, rows=64, depth=256, warps=4, stages=3, split=min(4, max(1, depth // 256)), prefetch=True)
    return _dot(rows=32, depth=128, warps=2, split=4 if depth <= 2048 else 8, prefetch=True)


def _mid(rows: int, depth: int) -> Plan:
    """Some 128 to 256 programs, which take their part of W into L2 while the kernel before them ends."""
    split = 8 if rows <= 1024 else 2 if rows <= 6144 else 1
    return Plan(dot=True, rows=64, depth=64, warps=4, stages=4, split=min(split, depth // 64), prefetch=True)


def _fma(*, rows: int, warps: int, prefetch: bool = False) -> Plan:
    return Plan(dot=False, rows=rows, depth=256 * warps, warps=warps, stages=1, prefetch=prefetch)


def _dot(*, rows: int, depth: int, warps: int, split: int, prefetch: bool = False) -> Plan:
    return Plan(dot=True, rows=rows, depth=depth, warps=warps, stages=4, split=split, prefetch=prefetch)
