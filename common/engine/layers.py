"""The parts that models are made of. Tensors are packed: [tokens, ...], the batch's requests end to end."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F


class Linear(Protocol):
    """x W^T + b over the last dimension of x: [tokens, in]."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, out]"""

    def forward_add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """residual + forward(x). residual: [tokens, out], which may be overwritten and returned: don't use it afterwards."""


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
