"""What the card can do, measured in the same run as what is compared with it."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

COPY_BYTES = 4 << 30
MATRIX = 8192


@dataclass(frozen=True)
class Ceilings:
    """bytes_per_second: read plus written, of a large device copy. flops_per_second: a large bf16 matrix product."""

    bytes_per_second: float
    flops_per_second: float

    def __str__(self) -> str:
        return f"copy {self.bytes_per_second / 1e12:.2f} TB/s, bf16 product {self.flops_per_second / 1e12:.0f} TFLOP/s"


def measure() -> Ceilings:
    """Takes about a second."""
    copy = _copy_seconds()
    torch.cuda.empty_cache()
    a, b = (torch.randn(MATRIX, MATRIX, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    product = median_seconds(lambda: torch.mm(a, b), repeat=20)
    torch.cuda.empty_cache()
    return Ceilings(2 * COPY_BYTES / copy, 2 * MATRIX**3 / product)


def _copy_seconds() -> float:
    source = torch.empty(COPY_BYTES // 2, dtype=torch.bfloat16, device="cuda").normal_()
    target = torch.empty_like(source)
    return median_seconds(lambda: target.copy_(source), repeat=10)


def median_seconds(body: Callable[[], object], *, repeat: int, warm_up: int = 3) -> float:
    """Of one call on the current stream, by device events."""
    for _ in range(warm_up):
        body()
    times: list[float] = []
    for _ in range(repeat):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        body()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)
