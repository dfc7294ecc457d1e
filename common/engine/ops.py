"""Ops: what a model is built of, by device. Attention is apart from it (common/engine/attention.py)."""

from __future__ import annotations

from importlib import import_module
from typing import Protocol

import torch

from common.engine.cpu_linear import make_linear
from common.engine.layers import Block, Gated, Linear, NormedBlock, NormedLinear, RMSNorm


class Ops(Protocol):
    """weight: [out, in], which may be kept in another layout; bias: [out]; norm: [in], of an RMSNorm before the product."""

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear: ...

    def normed_linear(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        norm: torch.Tensor,
        eps: float,
        shared: bool = False,
    ) -> NormedBlock:
        """norm(x) W^T + b: [tokens, in] -> [tokens, out]. shared: weight is also somebody else's and stays as it is; the others'
        are the block's own."""

    def gated_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, norm: torch.Tensor, eps: float) -> Block:
        """silu(gate) * up of (gate, up) = norm(x) W^T + b, gate's rows of W first: [tokens, in] -> [tokens, out / 2]."""

    def rotary_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """What rotations are kept in, for a model in dtype."""


class CpuOps:
    """Ops of torch alone, products by common/engine/cpu_linear.py."""

    def __init__(self, *, many_rows: bool = False) -> None:
        """many_rows: for an engine that computes prompts alone."""
        self._many_rows = many_rows

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        return make_linear(weight, bias, many_rows=self._many_rows)

    def normed_linear(
        self,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        norm: torch.Tensor,
        eps: float,
        shared: bool = False,
    ) -> NormedBlock:
        return NormedLinear(self.linear(weight, bias), RMSNorm(norm, eps))

    def gated_linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, norm: torch.Tensor, eps: float) -> Block:
        return Gated(NormedLinear(self.linear(weight, bias), RMSNorm(norm, eps)))

    def rotary_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype


def ops_for(device: str | torch.device, *, many_rows: bool = False) -> Ops:
    """The one place that knows which device has which. many_rows: see CpuOps."""
    if torch.device(device).type == "cuda":
        # Imported when asked for: it needs what only a machine with a GPU has.
        ops: Ops = import_module("common.engine.cuda.ops").CudaOps()
        return ops
    return CpuOps(many_rows=many_rows)
