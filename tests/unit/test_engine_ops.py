"""A model is right with any Ops that keep the protocol, and the CPU's are the formulas."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from common.engine.layers import PlainLinear
from common.engine.ops import CpuOps, ops_for
from tests.helpers.engine_driver import EngineDriver, engine
from tests.helpers.reference import greedy
from tests.helpers.tiny_model import make_tiny_model


class ThriftyLinear(PlainLinear):
    """Makes use of what forward_add may do: the residual is gone afterwards."""

    def forward_add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        total = self.forward(x) + residual
        residual.fill_(float("nan"))
        return total


class ThriftyOps(CpuOps):
    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> ThriftyLinear:
        return ThriftyLinear(weight, bias)


@pytest.mark.parametrize("qwen3", [False, True])
def test_a_residual_may_be_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, qwen3: bool) -> None:
    model = make_tiny_model(tmp_path, qwen3=qwen3)
    prompts = [[1], [5, 6, 7], list(range(100))]
    monkeypatch.setattr("common.engine.runner.ops_for", lambda device: ThriftyOps())
    with engine(model) as runner:
        outputs = EngineDriver(runner).generate(prompts, max_tokens=8, chunk_tokens=32)
    assert outputs == [greedy(model, prompt, 8) for prompt in prompts]


def test_the_cpus_ops_are_the_formulas() -> None:
    ops = ops_for("cpu")
    x, weight = torch.randn(3, 8), torch.rand(4)
    gate, up = x.double()[:, :4], x.double()[:, 4:]
    before = x.clone()
    torch.testing.assert_close(ops.silu_and_mul(x).double(), gate / (1 + (-gate).exp()) * up, rtol=1e-5, atol=1e-6)
    normed = up / (up.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight
    torch.testing.assert_close(ops.rms_norm(weight, 1e-6).forward(x[:, 4:]).double(), normed, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ops.linear(weight[None]).forward(x[:, :4].contiguous()), x[:, :4] @ weight[:, None])
    assert torch.equal(x, before) and ops.rotary_dtype(torch.bfloat16) == torch.bfloat16
