"""The parts that models are made of. Tensors are packed: [tokens, ...], the batch's requests end to end."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F

PACK_ROWS = 8
"""The batch size that packed weights are laid out for: measured best or near it from 1 to 512 rows (bench/engine_cpu.py)."""


class Linear(Protocol):
    """x W^T + b over the last dimension of x: [tokens, in]."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, out]"""

    def forward_add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """residual + forward(x). residual: [tokens, out], which may be overwritten and returned: don't use it afterwards."""


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
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
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


class Block(Protocol):
    """A stretch of a layer that a device may compute in one kernel."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, in] -> [tokens, out], in a new tensor."""


class Unnormed(NamedTuple):
    """What a product was made of, x: [tokens, in], while it wants rms_norm(x): its rows are to be divided by the roots of x's."""

    x: torch.Tensor
    eps: float


class NormedBlock(Block, Protocol):
    """norm(x) W^T + b."""

    def forward_late(self, x: torch.Tensor) -> tuple[torch.Tensor, Unnormed | None]:
        """forward(x), or what becomes it when its taker has divided by the roots of the Unnormed."""


class NormedLinear:
    """A Linear of the normed input."""

    def __init__(self, linear: Linear, norm: RMSNorm) -> None:
        self._linear = linear
        self._norm = norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._linear.forward(self._norm.forward(x))

    def forward_late(self, x: torch.Tensor) -> tuple[torch.Tensor, Unnormed | None]:
        return self.forward(x), None


class Gated:
    """silu of the first half of another block's output, times the second."""

    def __init__(self, block: Block) -> None:
        self._block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self._block.forward(x).chunk(2, dim=-1)
        return F.silu(gate).mul_(up)
