"""Products for small batches against float64, whole and split, with what is fused before and after them."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from bench.gpu.linear import SHAPES, Shape, plans
from common.engine.cuda.launch import power_of_2_from
from common.engine.cuda.linear_plans import PLANNED_TOKENS, best_plan
from common.engine.cuda.small_linear import Plan, Workspace, choose, small_linear

EPS = 1e-5
FLOAT32 = 2.0**-23
SIGMAS = 8.0
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
        folded: bool = False,
        gated: bool = False,
        add: bool = False,
    ):
        columns = rows // 2 if gated else rows
        dtype = torch.float16 if device.type == "cpu" and tokens > 1 else torch.bfloat16
        self.x = torch.randn(tokens, depth + 8, device=device).to(dtype)[:, :depth]
        self.weight = (torch.randn(rows, depth, device=device) / depth**0.5).to(dtype)
        self.norm_weight = (1 + torch.rand(depth, device=device)).to(dtype) if norm and not folded else None
        self.norm = norm
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
            norm=self.norm,
            norm_weight=self.norm_weight,
            eps=EPS,
            gated=self.gated,
            residual=self.residual,
            workspace=self.workspace,
            plan=plan,
        )
        assert self.out[tokens].isnan().all() and (self.workspace.counters == 0).all()
        return out

    def wanted(self) -> Bounded:
        """In float64, and how far from it a right product may be."""
        x: torch.Tensor = self.x.double()
        if self.norm:
            weight = None if self.norm_weight is None else self.norm_weight.double()
            x = torch.nn.functional.rms_norm(x, (x.shape[1],), weight, EPS)
        weight = self.weight.double()
        y, error = x @ weight.T, self._error(x, weight)
        if self.gated:
            (gate, up), (gate_error, up_error) = y.chunk(2, dim=-1), error.chunk(2, dim=-1)
            activated = torch.nn.functional.silu(gate)
            # silu is nowhere steeper than 1.1.
            error = 1.1 * gate_error * (up.abs() + up_error) + activated.abs() * up_error + FLOAT32 * (activated * up).abs()
            y = activated * up
        if self.residual is not None:
            y = y + self.residual.double()
        unit = rounding(self.x.dtype)
        return Bounded(y, error + unit * (y.abs() + error) + torch.finfo(self.x.dtype).smallest_normal)

    def _error(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """[tokens, rows] of x W^T, which come in float32.

        Sums: K additions, each off by at most FLOAT32 of what is summed, in whichever order. Rounding of x * norm_weight to x's
        dtype, where there is a norm: by d_k <= unit * x_k each. W's signs are random and know nothing of d, so by Hoeffding the
        sum of d_k W_k exceeds SIGMAS * unit * |x W|_2 with probability 2 exp(-SIGMAS^2 / 2) per product: 3e-14.
        """
        depth = x.shape[1]
        sums = FLOAT32 * (depth + 16) * (x.abs() @ weight.abs().T)
        if self.norm_weight is None:
            return sums
        return sums + SIGMAS * rounding(self.x.dtype) * (x.square() @ weight.square().T).sqrt()


class Bounded(NamedTuple):
    value: torch.Tensor
    error: torch.Tensor


def rounding(dtype: torch.dtype) -> float:
    """The most by which rounding to the nearest changes a number, of the number."""
    return torch.finfo(dtype).eps / 2


def assert_near(got: torch.Tensor, wanted: Bounded) -> None:
    excess = ((got.double() - wanted.value).abs() / wanted.error).nan_to_num(nan=float("inf")).max().item()
    assert excess <= 1, f"off by {excess:.2f} times what rounding can explain"


def test_the_bound_is_tight_enough_to_see_one_lost_tile(device: torch.device) -> None:
    """Of the smallest depth that a plan has."""
    product = Product(device, 2, 64, 1024, norm=True, folded=True)
    wanted = product.wanted()
    product.weight[:, 256:320] = 0
    with pytest.raises(AssertionError, match="off by"):
        assert_near(product.run(DOT), wanted)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
@pytest.mark.parametrize(("tokens", "rows", "depth"), [(2, 64, 1024), (3, 50, 576), (16, 24, 264)])
@pytest.mark.parametrize("norm", ["", "norm", "norm folded"], ids=["plain", "norm", "folded"])
def test_products_are_the_reference_s(device: torch.device, plan: Plan, tokens: int, rows: int, depth: int, norm: str) -> None:
    if plan.dot and norm == "norm":
        pytest.skip("the norm's weight is in W")
    product = Product(device, tokens, rows, depth, norm="norm" in norm, folded="folded" in norm)
    assert_near(product.run(plan), product.wanted())


@pytest.mark.parametrize("plan", [FMA, replace(FMA, stages=3), replace(FMA, rows=1, depth=1024, warps=4)])
@pytest.mark.parametrize("depth", [1024, 4096, 72])
def test_one_token_s_product_is_the_reference_s(device: torch.device, plan: Plan, depth: int) -> None:
    product = Product(device, 1, 20, depth, norm=True, add=True)
    assert_near(product.run(plan), product.wanted())


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
@pytest.mark.parametrize(("tokens", "rows", "depth"), [(2, 64, 512), (5, 44, 320)])
@pytest.mark.parametrize("folded", [False, True])
def test_gated_products_are_the_reference_s(
    device: torch.device, plan: Plan, tokens: int, rows: int, depth: int, folded: bool
) -> None:
    if plan.dot and (not folded or plan.split > 1):
        pytest.skip("the norm's weight is in W, which is not split")
    product = Product(device, tokens, rows, depth, norm=True, folded=folded, gated=True)
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
    product = Product(device, tokens, 64, 1024, norm=True, folded=tokens > 1, gated=gated)
    assert_near(product.run(None), product.wanted())


def test_a_split_product_is_the_same_every_time(device: torch.device) -> None:
    product = Product(device, 16, 128, 1024, norm=True, folded=True)
    first = product.run(replace(DOT, split=8)).clone()
    assert all(torch.equal(product.run(replace(DOT, split=8)), first) for _ in range(1 if device.type == "cpu" else 50))


@pytest.mark.parametrize("tokens", [1, 2, 16])
@pytest.mark.parametrize("depth", [64, 576, 1024, 3072, 4096, 14336])
@pytest.mark.parametrize("rows", [64, 1024, 4096, 28672, 151936])
def test_plans_are_sound(tokens: int, rows: int, depth: int) -> None:
    plan = choose(tokens, rows, depth)
    assert plan.dot or plan.depth >= 256 * plan.warps
    assert (plan.split - 1) * plan.depth < depth
    tiles = -(-rows // plan.rows)
    assert plan.split == 1 or Workspace(torch.device("cpu")).holds(tiles, plan.split, (plan.rows + 1) * 16)


@pytest.mark.parametrize("tokens", [1, 2, 4, 16, 32, 33])
def test_the_plans_that_models_get_fit_the_workspace(tokens: int) -> None:
    workspace = Workspace(torch.device("cpu"))
    for depth, rows, gated in itertools.product(
        (64, 256, 576, 1024, 2048, 3072, 4096, 14336),
        (64, 960, 1024, 4096, 6144, 8192, 28672, 151936),
        (False, True),
    ):
        weight = torch.empty(rows, depth, dtype=torch.bfloat16, device="meta")
        plan = best_plan(tokens, weight, gated=gated)
        assert (plan is None) == (tokens > PLANNED_TOKENS)
        if plan is not None and plan.split > 1:
            assert not gated
            tile_floats = (plan.rows + 1) * max(16, power_of_2_from(tokens))
            assert workspace.holds(-(-rows // plan.rows), plan.split, tile_floats), (rows, depth, plan)


@pytest.mark.parametrize("tokens", [1, 2, 8, 32, 64])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_benchmark_tries_no_plan_that_small_linear_refuses(shape: Shape, tokens: int) -> None:
    has_norm_weight = shape.norm and not shape.folded
    for plan in plans(shape, tokens):
        assert not plan.dot or not has_norm_weight and (plan.split == 1 or not shape.gated), plan
