"""A decode step's layers but for attention: our fused products beside the same from cuBLAS and our small kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from bench.gpu.clock import graph_us
from common.engine.cuda import kernels
from common.engine.cuda.small_linear import MAX_TOKENS, Workspace, choose, small_linear

EPS = 1e-5
PAGE_SIZE = 64


@dataclass(frozen=True)
class Geometry:
    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    inner: int
    qk_norm: bool
    head_dim: int = 128


GEOMETRIES = [
    Geometry("8B", 12, 4096, 32, 8, 14336, qk_norm=False),
    Geometry("0.6B", 28, 1024, 16, 8, 3072, qk_norm=True),
]


class Layers:
    """Random layers, their norms' weights in the products; q stands in for what attention would make of it."""

    def __init__(self, geometry: Geometry, tokens: int) -> None:
        g = geometry

        def make(*size: int) -> torch.Tensor:
            return torch.empty(size, dtype=torch.bfloat16, device="cuda").normal_(std=size[-1] ** -0.5)

        q_width, qkv_width = g.heads * g.head_dim, (g.heads + 2 * g.kv_heads) * g.head_dim
        self.geometry = g
        self.weights = [
            (make(qkv_width, g.hidden), make(g.hidden, q_width), make(2 * g.inner, g.hidden), make(g.hidden, g.inner))
            for _ in range(g.layers)
        ]
        self.head_norm = make(g.head_dim).fill_(1) if g.qk_norm else None
        self.pool = torch.zeros(2, g.layers, 2, PAGE_SIZE, g.kv_heads, g.head_dim, dtype=torch.bfloat16, device="cuda")
        self.cos_sin = torch.rand(PAGE_SIZE, g.head_dim, device="cuda")
        self.positions = torch.arange(tokens, device="cuda")
        self.x, self.normed = make(tokens, g.hidden), make(tokens, g.hidden)
        self.qkv, self.q = make(tokens, qkv_width), make(tokens, g.heads, g.head_dim)
        self.gate_up, self.inner = make(tokens, 2 * g.inner), make(tokens, g.inner)
        self.workspace = Workspace(torch.device("cuda"))

    @property
    def weight_bytes(self) -> int:
        return sum(2 * weight.numel() for layer in self.weights for weight in layer)

    def rope_store(self, layer: int, *, pdl: bool) -> None:
        kernels.qk_norm_rope_store(
            self.qkv, self.q, positions=self.positions, cos_sin=self.cos_sin, q_weight=self.head_norm, k_weight=self.head_norm,
            eps=EPS, pool=self.pool, layer=layer, out_loc=self.positions, pdl=pdl,
        )  # fmt: skip

    def fused(self, *, pdl: bool, prefetch: bool) -> None:
        def linear(
            x: torch.Tensor,
            weight: torch.Tensor,
            out: torch.Tensor,
            *,
            norm: bool = False,
            gated: bool = False,
            add: bool = False,
        ) -> None:
            plan = replace(choose(len(x), *weight.shape, gated=gated), prefetch=prefetch)
            small_linear(
                x, weight, out, norm=norm, eps=EPS, gated=gated, residual=out if add else None, workspace=self.workspace,
                plan=plan, pdl=pdl,
            )  # fmt: skip

        for layer, (qkv, o, gate_up, down) in enumerate(self.weights):
            linear(self.x, qkv, self.qkv, norm=True)
            self.rope_store(layer, pdl=pdl)
            linear(self.q.flatten(1), o, self.x, add=True)
            linear(self.x, gate_up, self.inner, norm=True, gated=True)
            linear(self.inner, down, self.x, add=True)

    def unfused(self, *, pdl: bool) -> None:
        for layer, (qkv, o, gate_up, down) in enumerate(self.weights):
            kernels.rms_norm(self.x, None, eps=EPS, out=self.normed, pdl=pdl)
            torch.mm(self.normed, qkv.T, out=self.qkv)
            self.rope_store(layer, pdl=pdl)
            self.x.addmm_(self.q.flatten(1), o.T)
            kernels.rms_norm(self.x, None, eps=EPS, out=self.normed, pdl=pdl)
            torch.mm(self.normed, gate_up.T, out=self.gate_up)
            kernels.silu_and_mul(self.gate_up, self.inner, pdl=pdl)
            self.x.addmm_(self.inner, down.T)

    def torch_only(self) -> None:
        for qkv, o, gate_up, down in self.weights:
            F.linear(F.rms_norm(self.x, self.x.shape[1:], None, EPS), qkv)
            self.x.addmm_(self.q.flatten(1), o.T)
            gate, up = F.linear(F.rms_norm(self.x, self.x.shape[1:], None, EPS), gate_up).chunk(2, dim=-1)
            self.x.addmm_(F.silu(gate) * up, down.T)


def compare(tokens: list[int]) -> None:
    """Prints microseconds per layer, and which part of 4.2 TB/s that is."""
    print(f"{'layers of':9} {'T':>3}   us per layer (share of 4.2 TB/s in reading weights)")
    for geometry in GEOMETRIES:
        for size in tokens:
            layers = Layers(geometry, size)
            floor = layers.weight_bytes / geometry.layers / 4.2e6
            ways: dict[str, Callable[[], None]] = {
                "torch": layers.torch_only,
                "cuBLAS + kernels": lambda layers=layers: layers.unfused(pdl=False),  # type: ignore[misc]
                "same, pdl": lambda layers=layers: layers.unfused(pdl=True),  # type: ignore[misc]
            }
            if size <= MAX_TOKENS:
                for name, pdl, prefetch in (("fused", False, False), ("pdl", True, False), ("pdl + prefetch", True, True)):
                    ways[name] = lambda layers=layers, pdl=pdl, prefetch=prefetch: layers.fused(pdl=pdl, prefetch=prefetch)  # type: ignore[misc]
            row = [f"{geometry.name:9} {size:3}  floor {floor:.2f}"]
            for name, way in ways.items():
                us = graph_us([way]) / geometry.layers
                row.append(f"{name} {us:.2f} ({floor / us:.0%})")
            print(" | ".join(row), flush=True)
