"""Ops: what a model is built of, by device. Attention is apart from it (common/engine/attention.py)."""

from __future__ import annotations

from importlib import import_module
from typing import Protocol

import torch
import torch.nn.functional as F

from common.engine.layers import Linear, Norm, RMSNorm, make_linear


class Ops(Protocol):
    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        """weight: [out, in]; bias: [out]. The weight may be kept in another layout."""

    def rms_norm(self, weight: torch.Tensor, eps: float) -> Norm:
        """An RMSNorm. weight: [hidden_size]."""

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up in a new tensor. gate_up: [tokens, 2 * inner], gate first -> [tokens, inner]."""

    def rotary_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """What rotations are kept in, for a model in dtype."""


class CpuOps:
    """Ops of torch alone, oneDNN's products where it has them."""

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        return make_linear(weight, bias)

    def rms_norm(self, weight: torch.Tensor, eps: float) -> Norm:
        return RMSNorm(weight, eps)

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def rotary_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype


def ops_for(device: str | torch.device) -> Ops:
    """The one place that knows which device has which."""
    if torch.device(device).type == "cuda":
        # Imported when asked for: it needs what only a machine with a GPU has.
        ops: Ops = import_module("common.engine.cuda.ops").CudaOps()
        return ops
    return CpuOps()
