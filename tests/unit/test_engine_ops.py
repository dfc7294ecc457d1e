"""A model is right with any Ops that keep the protocol, and the CPU's are the formulas."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from common.engine.cpu_linear import PlainLinear
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
    monkeypatch.setattr("common.engine.load.ops_for", lambda device, many_rows: ThriftyOps())
    with engine(model) as runner:
        outputs = EngineDriver(runner).generate(prompts, max_tokens=8, chunk_tokens=32)
    assert outputs == [greedy(model, prompt, 8) for prompt in prompts]


def test_the_cpus_ops_are_the_formulas() -> None:
    ops = ops_for("cpu")
    x, norm, weight, bias = torch.randn(3, 8), torch.rand(8), torch.randn(6, 8), torch.randn(6)
    before = x.clone()
    wide = x.double()
    normed = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * norm.double()
    product = normed @ weight.double().T + bias.double()
    gate, up = product[:, :3], product[:, 3:]
    blocks = {
        ops.linear(weight, bias): wide @ weight.double().T + bias.double(),
        ops.normed_linear(weight, bias, norm=norm, eps=1e-6): product,
        ops.gated_linear(weight, bias, norm=norm, eps=1e-6): gate / (1 + (-gate).exp()) * up,
    }
    for block, expected in blocks.items():
        torch.testing.assert_close(block.forward(x).double(), expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(x, before) and ops.rotary_dtype(torch.bfloat16) == torch.bfloat16
