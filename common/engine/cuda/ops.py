"""CudaOps: what models are built of on a GPU (common/engine/ops.py)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from common.engine.cuda import kernels
from common.engine.layers import Linear


class CudaOps:
    """cuBLAS products and fused Triton kernels."""

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
        return CudaLinear(weight, bias)

    def rms_norm(self, weight: torch.Tensor, eps: float) -> CudaRMSNorm:
        return CudaRMSNorm(weight, eps)

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[tokens, 2 * inner] -> [tokens, inner]: silu of the first half times the second."""
        out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
        return kernels.silu_and_mul(gate_up, out)

    def rotary_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float32


class CudaLinear:
    """x W^T + b by cuBLAS. weight: [out, in]."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._weight = weight
        self._transposed = weight.T
        self._bias = bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._weight, self._bias)

    def forward_add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Adds in place, within the product: residual is read and written once."""
        if self._bias is not None:
            residual += self._bias
        return residual.addmm_(x, self._transposed)


class CudaRMSNorm:
    """x / rms(x) * weight over the last dimension, in float32 inside."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self._weight = weight
        self._eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return kernels.rms_norm(x, self._weight, eps=self._eps, out=torch.empty_like(x))
