"""Products for small batches against float64, whole and split, with what is fused before and after them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from common.engine.cuda.small_linear import Plan, Workspace, choose, small_linear

EPS = 1e-5
FMA = Plan(dot=False, rows=4, depth=256, warps=1, stages=1)
DOT = Plan(dot=True, rows=16, depth=64, warps=4, stages=3)
PLANS = {"fma": FMA, "fma pipelined": replace(FMA, stages=3, rows=2), "dot": DOT, "dot split": replace(DOT, split=4)}


class Product:
    """Inputs of one product: out = residual + f(norm(x) W^T). rows: of W.

    In bf16, but on the CPU only where there is one token and so no tl.dot: the interpreter's takes bf16's bits for integers.
    """

    def __init__(
        self,
        device: torch.device,
        tokens: int,
        rows: int,
        depth: int,
        *,
        norm: bool = False,
        gated: bool = False,
        add: bool = False,
    ):
        columns = rows // 2 if gated else rows
        dtype = torch.float16 if device.type == "cpu" and tokens > 1 else torch.bfloat16
        self.x = torch.randn(tokens, depth + 8, device=device).to(dtype)[:, :depth]
        self.weight = (torch.randn(rows, depth, device=device) / depth**0.5).to(dtype)
        self.norm_weight = (1 + torch.rand(depth, device=device)).to(dtype) if norm else None
        self.residual = torch.randn(tokens, columns + 8, device=device).to(dtype)[:, :columns] if add else None
        self.out = torch.full((tokens + 1, columns), float("nan"), device=device).to(dtype)
        self.gated = gated
        self.workspace = Workspace(device)

    def run(self, plan: Plan | None, *, in_place: bool = False) -> torch.Tensor:
        tokens = len(self.x)
        out: torch.Tensor = self.residual if in_place and self.residual is not None else self.out[:tokens]
        small_linear(
            self.x,
            self.weight,
            out,
            norm_weight=self.norm_weight,
            eps=EPS,
            gated=self.gated,
            residual=self.residual,
            workspace=self.workspace,
            plan=plan,
        )
        assert self.out[tokens].isnan().all() and (self.workspace.counters == 0).all()
        return out

    def wanted(self) -> torch.Tensor:
        x: torch.Tensor = self.x.double()
        if self.norm_weight is not None:
            x = torch.nn.functional.rms_norm(x, (x.shape[1],), self.norm_weight.double(), EPS)
        y: torch.Tensor = x @ self.weight.double().T
        if self.gated:
            gate, up = y.chunk(2, dim=-1)
            y = torch.nn.functional.silu(gate) * up
        return y if self.residual is None else y + self.residual.double()


def assert_near(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """Within bf16's rounding of the result and, for the tensor cores, of x * norm_weight."""
    torch.testing.assert_close(got.double(), wanted, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
@pytest.mark.parametrize(("tokens", "rows", "depth"), [(2, 64, 1024), (3, 50, 576), (16, 24, 264)])
@pytest.mark.parametrize("norm", [False, True], ids=["plain", "norm"])
def test_products_are_the_reference_s(device: torch.device, plan: Plan, tokens: int, rows: int, depth: int, norm: bool) -> None:
    product = Product(device, tokens, rows, depth, norm=norm)
    assert_near(product.run(plan), product.wanted())


@pytest.mark.parametrize("plan", [FMA, replace(FMA, stages=3), replace(FMA, rows=1, depth=1024, warps=4)])
@pytest.mark.parametrize("depth", [1024, 4096, 72])
def test_one_token_s_product_is_the_reference_s(device: torch.device, plan: Plan, depth: int) -> None:
    product = Product(device, 1, 20, depth, norm=True, add=True)
    assert_near(product.run(plan), product.wanted())


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
@pytest.mark.parametrize(("tokens", "rows", "depth"), [(2, 64, 512), (5, 44, 320)])
def test_gated_products_are_the_reference_s(device: torch.device, plan: Plan, tokens: int, rows: int, depth: int) -> None:
    product = Product(device, tokens, rows, depth, norm=True, gated=True)
    assert_near(product.run(plan), product.wanted())


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
def test_the_residual_is_added_and_may_be_overwritten(device: torch.device, plan: Plan, in_place: bool) -> None:
    product = Product(device, 2, 40, 256, add=True)
    wanted = product.wanted()
    assert_near(product.run(plan, in_place=in_place), wanted)


@pytest.mark.parametrize("tokens", [1, 2, 8, 16])
@pytest.mark.parametrize("gated", [False, True])
def test_the_chosen_plan_is_the_reference_s(device: torch.device, tokens: int, gated: bool) -> None:
    product = Product(device, tokens, 64, 1024, norm=True, gated=gated)
    assert_near(product.run(None), product.wanted())


def test_a_split_product_is_the_same_every_time(device: torch.device) -> None:
    product = Product(device, 16, 128, 1024, norm=True)
    first = product.run(replace(DOT, split=8)).clone()
    assert all(torch.equal(product.run(replace(DOT, split=8)), first) for _ in range(1 if device.type == "cpu" else 50))


@pytest.mark.parametrize("tokens", [1, 2, 16])
@pytest.mark.parametrize("depth", [64, 576, 1024, 3072, 4096, 14336])
@pytest.mark.parametrize("rows", [64, 1024, 4096, 28672, 151936])
def test_plans_are_sound(tokens: int, rows: int, depth: int) -> None:
    plan = choose(tokens, rows, depth, gated=True)
    assert plan.rows >= 2 and (plan.dot or plan.depth >= 256 * plan.warps)
    assert (plan.split - 1) * plan.depth < depth
    tiles = -(-rows // plan.rows)
    assert plan.split == 1 or Workspace(torch.device("cpu")).holds(tiles, plan.split, (plan.rows + 1) * 16)
