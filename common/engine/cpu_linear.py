"""Products on the CPU: each dtype's by what this machine has for it."""

from __future__ import annotations

import threading
from functools import cache

import torch
import torch.nn.functional as F

from common.engine.layers import Linear

PACK_ROWS = 8
"""The batch size that packed weights are laid out for: measured best or near it from 1 to 512 rows (bench/engine_cpu.py)."""
BLOCK_ELEMENTS = 1 << 19
"""Of a weight that are widened at a time: 2 MiB in float32, which a core's second cache takes or nearly."""


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
    """A Linear whose weight is in oneDNN's blocked layout: with AVX-512 2-3 times as fast as F.linear at every batch size, with
    AVX2 1.3 to 2 times at those of decode."""

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


class WidenedLinear:
    """A Linear with a weight of 16 bits for a processor that does not compute in them. Rows of the weight become float32, a block
    at a time, and so does the product, rounded once at the end: from two rows of x on up to nine times as fast as F.linear, which
    goes through such weights again for every row. A single row is left to it."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._weight = weight
        self._bias = bias
        self._rows = max(1, BLOCK_ELEMENTS // weight.shape[1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 1:
            return F.linear(x, self._weight, self._bias)
        wide = x.float()
        y = x.new_empty(x.shape[0], self._weight.shape[0])
        for start in range(0, self._weight.shape[0], self._rows):
            block = self._weight[start : start + self._rows]
            bias = None if self._bias is None else self._bias[start : start + self._rows].float()
            y[:, start : start + self._rows] = F.linear(wide, _scratch.widened(block), bias)
        return y

    def forward_add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self.forward(x).add_(residual)


class _Scratch(threading.local):
    """Memory for a block, of each thread: in memory that is new each time the kernel would clear every page of it."""

    def __init__(self) -> None:
        self._memory = torch.empty(0)

    def widened(self, block: torch.Tensor) -> torch.Tensor:
        """block in float32, until the next call."""
        if self._memory.numel() < block.numel():
            with torch.inference_mode(False):  # Usable in either mode.
                self._memory = torch.empty(block.numel())
        return self._memory[: block.numel()].view(block.shape).copy_(block)


_scratch = _Scratch()


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None = None, *, many_rows: bool = False) -> Linear:
    """weight: [out, in]; bias: [out]. many_rows: it will be given dozens of rows at a time, as a prompt's."""
    if can_pack(weight.dtype, weight.device):
        return PlainLinear(weight, bias) if many_rows and blas_leads() else PackedLinear(weight, bias)
    return (WidenedLinear if is_widened(weight.dtype, weight.device) else PlainLinear)(weight, bias)


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a b^T for a: [n, k] and b: [m, k] -> [n, m]."""
    if can_pack(a.dtype, a.device) and not blas_leads():
        # A strided operand it would take too, and then a thousand times as long.
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(a.contiguous(), b.contiguous(), None, "none", [], "")
        return y
    return (a.float() @ b.float().T).to(a.dtype) if is_widened(a.dtype, a.device) else a @ b.T


@cache
def blas_leads() -> bool:
    """Whether float32 products of many rows are faster by torch's BLAS than by oneDNN: MKL's are with AVX2 (by 6 %), and oneDNN's
    with AVX-512 (by far)."""
    return torch.backends.mkl.is_available() and torch.backends.cpu.get_cpu_capability() == "AVX2"


@cache
def is_widened(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether products of that dtype are computed in float32: it has 16 bits, and this CPU does not compute in it."""
    if device.type != "cpu":
        return False
    if dtype == torch.bfloat16:
        return not torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return dtype == torch.float16 and not torch.ops.mkldnn._is_mkldnn_fp16_supported()


@cache
def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this build of torch and this CPU have oneDNN products of that dtype."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()))
