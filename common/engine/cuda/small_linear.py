"""x W^T for few tokens, where the time is that of reading W: with RMSNorm before it, and SiLU or a residual after it.

So a layer is four of these and the attention: norm + qkv; o + residual; norm + gate and up + SiLU; down + residual.
Two ways to do it, on the ordinary cores for one token (or a few), on the tensor cores for more; choose() has the constants.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from common.engine.cuda.jit.linear import linear_dot_kernel, linear_fma_kernel
from common.engine.cuda.launch import INTERPRETED, ceil_div, launch_options, power_of_2_from

MAX_TOKENS = 128
MIN_DOT_TOKENS = 16
"""The tensor cores take no fewer columns."""
FMA_TOKENS = 1
"""Up to so many tokens the ordinary cores keep up with the memory."""
FMA_PROGRAMS = 700
"""With so many programs W is spread well enough over the SMs; then rather more rows each, for x is read once per program."""
FMA_MAX_ROWS = 4
FMA_MAX_WARPS = 4
DOT_PROGRAMS = 256
"""A tile of W is split along K until there are so many programs."""
DOT_ROWS = 64
DOT_DEPTH = 128
DOT_STAGES = 4


@dataclass(frozen=True)
class Plan:
    """How a product is cut up. A tile is rows x depth of W, loaded by so many warps at a time.

    dot: on the tensor cores, in split parts of K that the last program to finish adds up; gated, there are two tiles, of the gate
    and of the up projection, and one part.
    stages: tiles on their way through shared memory (at most 1: through registers, one ahead).
    prefetch: each program begins by sending for W, to L2, even before the kernel before this one has ended: for all of its part,
    with dot for its first tile.
    """

    dot: bool
    rows: int
    depth: int
    warps: int
    stages: int
    split: int = 1
    prefetch: bool = False


def choose(tokens: int, out_features: int, in_features: int, *, gated: bool = False) -> Plan:
    """out_features: rows of W, so that a gated product has half as many columns."""
    if tokens <= FMA_TOKENS:
        warps = min(FMA_MAX_WARPS, max(1, power_of_2_from(in_features + 1) // 512))
        rows = 2 if gated else 1
        while rows < FMA_MAX_ROWS and out_features // (2 * rows) >= FMA_PROGRAMS:
            rows *= 2
        return Plan(dot=False, rows=rows, depth=256 * warps, warps=warps, stages=1)
    tiles, steps = ceil_div(out_features, DOT_ROWS), ceil_div(in_features, DOT_DEPTH)
    split = 1
    while tiles * split < DOT_PROGRAMS and split * 4 <= steps and not gated:
        split *= 2
    return Plan(dot=True, rows=DOT_ROWS, depth=DOT_DEPTH, warps=4, stages=DOT_STAGES, split=split)


class Workspace:
    """Where split products meet. One for all products of a stream: each leaves it as it found it."""

    def __init__(self, device: torch.device, *, floats: int = 1 << 20, tiles: int = 4096) -> None:
        self.partial = torch.empty(floats, dtype=torch.float32, device=device)
        self.counters = torch.zeros(tiles, dtype=torch.int32, device=device)

    def holds(self, tiles: int, split: int, tile_floats: int) -> bool:
        return tiles <= self.counters.numel() and tiles * split * tile_floats <= self.partial.numel()


def small_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    *,
    norm: bool = False,
    norm_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    residual: torch.Tensor | None = None,
    workspace: Workspace | None = None,
    plan: Plan | None = None,
    pdl: bool | None = None,
) -> torch.Tensor:
    """out = residual + f(norm(x) weight^T), sums in float32, the same to the bit in each run of a plan. Returns out.

    x: [tokens, K] bf16 or fp16, tokens <= MAX_TOKENS, K a multiple of 8. weight: [N, K] contiguous; gated: [2 N, K], gate rows
    first, and f is silu(gate) * up; else f is nothing. out, residual: [tokens, N]; out may be residual, neither may be x.
    Rows of x, out and residual are contiguous, at any stride; on the tensor cores x's begin at multiples of 16 bytes.
    norm: x goes through an RMSNorm first. norm_weight: [K], its weight, not on the tensor cores; None: of ones (bf16 where x may
    be large: x * norm_weight is rounded before it is divided by the root).
    workspace: needed by plans that split. plan: choose()'s unless given.
    """
    tokens, depth = x.shape
    rows, columns = weight.shape[0], out.shape[1]
    assert tokens <= MAX_TOKENS and depth % 8 == 0 and weight.is_contiguous() and rows == columns * (2 if gated else 1)
    assert x.stride(1) == out.stride(1) == 1 and (residual is None or residual.stride(1) == 1)
    plan = plan or choose(tokens, rows, depth, gated=gated)
    assert norm or norm_weight is None
    strides = (0 if residual is None else residual.stride(0), out.stride(0))
    common = {
        "TOKENS": tokens, "N": columns, "K": depth, "NORM": norm, "GATED": gated, "ROWS": plan.rows, "BK": plan.depth,
        "STAGES": plan.stages, "LINES": prefetched_lines(plan, depth), **launch_options(plan.warps, pdl=pdl),
    }  # fmt: skip
    if plan.dot:
        assert norm_weight is None and (plan.split == 1 or not gated)
        _on_tensor_cores(x, weight, residual, out, strides, eps, workspace, plan, common)
    else:
        linear_fma_kernel[(ceil_div(rows, plan.rows),)](
            x, weight, norm_weight, residual, out, x.stride(0), *strides, eps, TB=power_of_2_from(tokens), **common
        )  # fmt: skip
    return out


def _on_tensor_cores(
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor | None,
    out: torch.Tensor,
    strides: tuple[int, int],
    eps: float,
    workspace: Workspace | None,
    plan: Plan,
    common: dict[str, Any],
) -> None:
    tiles, padded = ceil_div(out.shape[1], plan.rows), max(MIN_DOT_TOKENS, power_of_2_from(len(x)))
    if plan.split > 1:
        assert workspace is not None and workspace.holds(tiles, plan.split, (plan.rows + 1) * padded)
    shared = (None, None) if workspace is None else (workspace.partial, workspace.counters)
    weight_tiles = TensorDescriptor.from_tensor(weight, [plan.rows, plan.depth])
    x_tiles = TensorDescriptor.from_tensor(x, [padded, plan.depth])
    linear_dot_kernel[(tiles * plan.split,)](
        weight_tiles, x_tiles, weight, residual, out, *shared, *strides, eps, TB=padded, SPLIT=plan.split, **common
    )  # fmt: skip


def prefetched_lines(plan: Plan, depth: int) -> int:
    """128-byte lines of a row that a program sends for, rounded up to a power of two."""
    if not plan.prefetch or INTERPRETED or depth % 64:
        return 0
    return power_of_2_from((plan.depth if plan.dot else depth) // 64)
