"""Which plan of small_linear suits which product: every candidate beside torch's F.linear. `python -m bench.gpu.kernels` runs it.

Candidates are compiled by many processes first. Each is checked against torch before it is timed. Weights differ from launch to
launch, so that they come from memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch
import torch.nn.functional as F
from triton.runtime.errors import OutOfResources

from bench.gpu.clock import copies_beyond_l2, graph_us
from common.engine.cuda.small_linear import Plan, Workspace, choose, small_linear

EPS = 1e-5


@dataclass(frozen=True)
class Shape:
    """rows x depth: of W. folded: the norm's weight is in it."""

    name: str
    rows: int
    depth: int
    norm: bool = False
    folded: bool = False
    gated: bool = False
    add: bool = False

    @property
    def columns(self) -> int:
        return self.rows // 2 if self.gated else self.rows

    @property
    def may_dot(self) -> bool:
        """The kernel on the tensor cores knows no norm's weight."""
        return self.folded or not self.norm


SHAPES = [
    Shape("8B qkv", 6144, 4096, norm=True, folded=True),
    Shape("8B o", 4096, 4096, add=True),
    Shape("8B gate_up", 28672, 4096, norm=True, folded=True, gated=True),
    Shape("8B down", 4096, 14336, add=True),
    Shape("8B head", 128256, 4096, norm=True, folded=True),
    Shape("0.6B qkv", 4096, 1024, norm=True, folded=True),
    Shape("0.6B o", 1024, 2048, add=True),
    Shape("0.6B gate_up", 6144, 1024, norm=True, folded=True, gated=True),
    Shape("0.6B down", 1024, 3072, add=True),
    Shape("0.6B head", 151936, 1024, norm=True),
    Shape("8B qkv plain", 6144, 4096),
    Shape("0.6B qkv plain", 4096, 1024),
    Shape("0.6B gate_up plain", 6144, 1024),
]


class Inputs:
    """One set of operands of a product."""

    def __init__(self, shape: Shape, tokens: int, *, filled: bool = True) -> None:
        def make(*size: int) -> torch.Tensor:
            empty = torch.empty(size, dtype=torch.bfloat16, device="cuda")
            return empty.normal_() if filled else empty

        self.shape = shape
        self.x = make(tokens, shape.depth)
        self.weight = make(shape.rows, shape.depth).mul_(shape.depth**-0.5)
        self.norm_weight = make(shape.depth) if shape.norm and not shape.folded else None
        self.residual = make(tokens, shape.columns) if shape.add else None
        self.out = make(tokens, shape.columns)

    def ours(self, plan: Plan, workspace: Workspace, *, pdl: bool) -> None:
        small_linear(
            self.x, self.weight, self.out, norm=self.shape.norm, norm_weight=self.norm_weight, eps=EPS, gated=self.shape.gated,
            residual=self.residual, workspace=workspace, plan=plan, pdl=pdl,
        )  # fmt: skip

    def product(self) -> torch.Tensor:
        """torch's, without the norm and the SiLU."""
        if self.residual is not None:
            return torch.addmm(self.residual, self.x, self.weight.T)
        return F.linear(self.x, self.weight)

    def wanted(self) -> torch.Tensor:
        """Of everything, in float32."""
        x = self.x.float()
        if self.shape.norm:
            x = F.rms_norm(x, (x.shape[1],), None if self.norm_weight is None else self.norm_weight.float(), EPS)
        y = x @ self.weight.float().T
        if self.shape.gated:
            y = F.silu(y[:, : self.shape.columns]) * y[:, self.shape.columns :]
        return y if self.residual is None else y + self.residual


def candidates(shape: Shape, tokens: int) -> Iterator[Plan]:
    if tokens <= 4:
        for rows in (1, 2, 4, 8) if tokens == 1 else (2, 4):
            for warps in (2, 4, 8):
                if rows >= 1 + shape.gated and 256 * warps <= shape.depth and shape.rows // rows >= 200:
                    plan = Plan(dot=False, rows=rows, depth=256 * warps, warps=warps, stages=1)
                    yield from (plan, replace(plan, prefetch=True)) if warps == 4 else (replace(plan, prefetch=warps == 2),)
        yield Plan(dot=False, rows=4, depth=1024, warps=4, stages=4)
    if tokens > 1 and shape.may_dot:
        tiles = ((64, 128, 4, 3), (64, 128, 4, 4), (64, 128, 4, 6), (64, 64, 4, 6), (128, 64, 4, 5), (128, 128, 8, 3))
        for rows, depth, warps, stages in (
            tiles if tokens <= 32 else ((64, 64, 4, 4), (64, 128, 4, 3), (128, 64, 4, 4), (128, 128, 8, 3))
        ):
            for split in (1,) if shape.gated else (1, 2, 4, 8):
                programs = -(-shape.columns // rows) * split
                if programs >= 90 and (split == 1 or programs <= 1100) and split * depth <= shape.depth:
                    yield Plan(dot=True, rows=rows, depth=depth, warps=warps, stages=stages, split=split, prefetch=True)


def plans(shape: Shape, tokens: int) -> list[Plan]:
    """choose()'s first, where it serves the shape. Perhaps none."""
    chosen = choose(tokens, shape.rows, shape.depth, gated=shape.gated)
    return [*dict.fromkeys([*[chosen] * (shape.may_dot or not chosen.dot), *candidates(shape, tokens)])]


def compile_plan(job: tuple[Shape, int, Plan]) -> bool:
    """In a process of its own: leaves the binary in Triton's cache. False if the card has too little shared memory for it."""
    shape, tokens, plan = job
    try:
        Inputs(shape, tokens, filled=False).ours(plan, Workspace(torch.device("cuda"), floats=1 << 25), pdl=True)
    except OutOfResources:
        return False
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return True


def label(plan: Plan) -> str:
    end = (f"x{plan.split}" if plan.split > 1 else "") + (" pf" if plan.prefetch else "")
    return f"{'dot' if plan.dot else 'fma'} {plan.rows}x{plan.depth} w{plan.warps} s{plan.stages}{end}"


def measure(shape: Shape, tokens: int, possible: list[Plan]) -> tuple[float, list[tuple[float, Plan]]]:
    """Microseconds of torch's product, and of each plan that is right, best first."""
    weight_bytes = shape.rows * shape.depth * 2
    sets = [Inputs(shape, tokens) for _ in range(copies_beyond_l2(weight_bytes))]
    workspace = Workspace(torch.device("cuda"), floats=1 << 25)
    timed = []
    wanted = sets[0].wanted()
    for plan in possible:
        sets[0].ours(plan, workspace, pdl=True)
        error = float((sets[0].out.float() - wanted).abs().max() / wanted.abs().max())
        if error > 2e-2:
            print(f"WRONG {shape.name} T{tokens} {label(plan)}: relative error {error:.3g}")
            continue
        launches: list[Callable[[], object]] = [partial(one.ours, plan, workspace, pdl=True) for one in sets]
        timed.append((graph_us(launches), plan))
    return graph_us([one.product for one in sets]), sorted(timed, key=lambda entry: entry[0])


def tune(tokens: list[int], *, only: str, top: int) -> list[dict[str, Any]]:
    """Prints a row per product. only: parts of shapes' names, by commas; top: plans to print. Returns every plan's time."""
    jobs = [
        (shape, size, plan)
        for shape in SHAPES
        if any(part in shape.name for part in only.split(","))
        for size in tokens
        for plan in plans(shape, size)
    ]
    with ProcessPoolExecutor(min(len(jobs), os.cpu_count() or 1), mp_context=get_context("spawn")) as pool:
        fits = list(pool.map(compile_plan, jobs))
    work: dict[tuple[Shape, int], list[Plan]] = {}
    for (shape, size, plan), is_possible in zip(jobs, fits, strict=True):
        if is_possible:
            work.setdefault((shape, size), []).append(plan)
    print(
        f"{'W':13} {'rows x depth':>13} {'T':>2} {'torch us':>8} {'GB/s':>5}   best, * chosen: us GB/s (kind tile warps stages)"
    )
    results = []
    for (shape, size), possible in work.items():
        torch_us, timed = measure(shape, size, possible)
        chosen = choose(size, shape.rows, shape.depth, gated=shape.gated)
        print_row(shape, size, torch_us, [entry for i, entry in enumerate(timed) if i < top or entry[1] == chosen], chosen)
        results.append(
            {"shape": asdict(shape), "tokens": size, "torch_us": torch_us, "plans": [[us, asdict(p)] for us, p in timed]}
        )
    return results


def print_row(shape: Shape, size: int, torch_us: float, timed: list[tuple[float, Plan]], chosen: Plan) -> None:
    megabytes = shape.rows * shape.depth * 2e-6
    row = [f"{shape.name:13} {f'{shape.rows}x{shape.depth}':>13} {size:2} {torch_us:8.2f} {megabytes / torch_us * 1e3:5.0f}  "]
    row += [f"{us:.2f} {megabytes / us * 1e3:.0f} ({label(plan)}){'*' * (plan == chosen)}" for us, plan in timed]
    print(" | ".join(row), flush=True)
