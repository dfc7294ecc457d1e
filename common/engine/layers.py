"""The parts that models are made of. Tensors are packed: [tokens, ...], the batch's requests end to end."""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F

from common.engine.model_config import RopeScaling

PACK_ROWS = 8
"""The batch size that packed weights are laid out for: measured best or near it from 1 to 512 rows (bench/engine_cpu.py)."""


class Linear(Protocol):
    """x W^T + b over the last dimension of x: [tokens, in]."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, out]"""

    def forward_add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """residual + forward(x), in a new tensor. residual: [tokens, out]."""


class PlainLinear:
    """A Linear whose weight is an ordinary [out, in] tensor."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)

    def forward_add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self.forward(x).add_(residual)


class PackedLinear:
    """A Linear whose weight is in oneDNN's blocked layout: on the CPU 2-3 times as fast as F.linear at every batch size."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, PACK_ROWS)
        self._bias = bias
        self._apply = torch.ops.mkldnn._linear_pointwise.default
        self._apply_add = torch.ops.mkldnn._linear_pointwise.binary

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self._apply(x, self._weight, self._bias, "none", [], "")
        return y

    def forward_add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self._apply_add(x, residual, self._weight, self._bias, "add")
        return y


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """Packed where oneDNN can compute weight's dtype on this machine, plain elsewhere. weight: [out, in]; bias: [out]."""
    return PackedLinear(weight, bias) if can_pack(weight.dtype, weight.device) else PlainLinear(weight, bias)


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a b^T for a: [n, k] and b: [m, k] -> [n, m]."""
    if not can_pack(a.dtype, a.device):
        return a @ b.T
    # A strided operand it would take too, and then a thousand times as long.
    y: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(a.contiguous(), b.contiguous(), None, "none", [], "")
    return y


@cache
def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this build of torch and this CPU have oneDNN products of that dtype."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()))


class RMSNorm:
    """x / rms(x) * weight over the last dimension."""

    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        self._weight = weight
        self._shape = tuple(weight.shape)
        self._eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self._shape, self._weight, self._eps)


class RotaryRows(NamedTuple):
    """The rotations of one step's tokens. cos: [tokens, 1, head_dim], its halves equal; sin: [tokens, 1, head_dim / 2]."""

    cos: torch.Tensor
    sin: torch.Tensor

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        """x: [tokens, heads, head_dim]; its halves (a, b) become (a cos - b sin, b cos + a sin), in a new contiguous tensor."""
        half = x.shape[-1] // 2
        rotated = x * self.cos
        rotated[..., :half].addcmul_(x[..., half:], self.sin, value=-1)
        rotated[..., half:].addcmul_(x[..., :half], self.sin)
        return rotated


class RotaryEmbedding:
    """Every position's rotation, computed once in float32 and kept in the model's dtype."""

    def __init__(
        self, head_dim: int, *, theta: float, scaling: RopeScaling | None, max_context: int, dtype: torch.dtype, device: str
    ) -> None:
        angles = torch.outer(torch.arange(max_context).float(), inverse_frequencies(head_dim, theta=theta, scaling=scaling))
        cos = angles.cos()
        self._cos = torch.cat([cos, cos], dim=-1).to(device, dtype)[:, None]
        self._sin = angles.sin().to(device, dtype)[:, None]

    def rows(self, positions: torch.Tensor) -> RotaryRows:
        """positions: [tokens] int64, each below max_context."""
        return RotaryRows(self._cos[positions], self._sin[positions])


def inverse_frequencies(head_dim: int, *, theta: float, scaling: RopeScaling | None) -> torch.Tensor:
    """[head_dim / 2] float32: radians per position of each rotating pair."""
    frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    # llama3: pairs that turn less than low_freq_factor times within the original context are stretched, fading out upwards.
    turns = scaling.original_max_context * frequencies / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    keep = ((turns - scaling.low_freq_factor) / span).clamp(0, 1)
    return frequencies * keep + frequencies / scaling.factor * (1 - keep)
