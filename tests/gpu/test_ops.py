"""The blocks that models are made of on a GPU against the same in float64."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from common.engine.cuda.launch import INTERPRETED
from common.engine.cuda.linear_plans import PLANNED_TOKENS
from common.engine.cuda.ops import LATE_TOKENS, CudaOps

EPS = 1e-5
MAX_ERROR = 2e-2 if INTERPRETED else 1e-2
"""The interpreter cuts bf16 off instead of rounding it."""


@pytest.fixture
def dtype(device: torch.device, tokens: int) -> torch.dtype:
    """The interpreter's tl.dot takes bf16's bits for integers, and for more tokens there is none."""
    return torch.float16 if device.type == "cpu" and tokens <= PLANNED_TOKENS else torch.bfloat16


@pytest.mark.parametrize("is_large", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 5, PLANNED_TOKENS, PLANNED_TOKENS + 1, LATE_TOKENS, LATE_TOKENS + 1])
@pytest.mark.parametrize("has_bias", [False, True])
def test_blocks_are_the_formulas(
    device: torch.device, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, is_large: bool, tokens: int, has_bias: bool
) -> None:
    # A weight that is large is one that the interpreter takes long for.
    monkeypatch.setattr("common.engine.cuda.linear_plans.SMALL_ELEMENTS", 0 if is_large else 1 << 30)
    ops, depth = CudaOps(), 256
    x = (torch.randn(tokens, depth, device=device) * 20).to(dtype)
    norm = (1 + torch.rand(depth, device=device)).to(dtype)
    wide = (torch.randn(6 * depth, depth, device=device) / depth**0.5).to(dtype)
    bias = torch.randn(len(wide), device=device).to(dtype) if has_bias else None
    product = torch.nn.functional.rms_norm(x.double(), (depth,), norm.double(), EPS) @ wide.double().T
    if bias is not None:
        product += bias.double()
    gate, up = product.chunk(2, dim=-1)
    given = wide.clone()
    assert_near(ops.normed_linear(given, bias, norm=norm, eps=EPS, shared=True).forward(x), product)
    assert torch.equal(given, wide)
    assert_near(ops.normed_linear(wide.clone(), bias, norm=norm, eps=EPS).forward(x), product)
    late, unnormed = ops.normed_linear(wide.clone(), bias, norm=norm, eps=EPS).forward_late(x)
    assert (unnormed is not None) == (dtype == torch.bfloat16 and not has_bias and PLANNED_TOKENS < tokens <= LATE_TOKENS)
    root = 1 if unnormed is None else (unnormed.x.double().square().mean(1, keepdim=True) + unnormed.eps).sqrt()
    assert_near(late / root, product)
    assert_near(ops.gated_linear(wide.clone(), bias, norm=norm, eps=EPS).forward(x), torch.nn.functional.silu(gate) * up)


def assert_near(got: torch.Tensor, wanted: torch.Tensor) -> None:
    error = (got.double() - wanted).norm() / wanted.norm()
    assert error < MAX_ERROR, f"relative error {error:.1e}"
