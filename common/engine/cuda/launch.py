"""What every launch of a Triton kernel is made of: its shape and its options."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Triton's interpreter runs the kernels, on CPU tensors: what is only an instruction of the GPU is left out."""


@cache
def has_pdl() -> bool:
    """Whether this card can launch a kernel before the one before it has ended."""
    return not INTERPRETED and torch.cuda.get_device_capability()[0] >= 9


def launch_options(warps: int, *, pdl: bool | None) -> dict[str, Any]:
    """pdl: programmatic dependent launch (see kernels); None: where the card has it."""
    pdl = has_pdl() and pdl is not False
    options: dict[str, Any] = {"PDL": pdl, "num_warps": warps}
    return options | {"launch_pdl": True} if pdl else options


def warps_for(elements: int) -> int:
    """For a program that takes so many 2-byte elements (a power of two), 8 (16 bytes) to a thread."""
    return max(1, min(16, elements // 256))


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def is_power_of_2(n: int) -> bool:
    return n & (n - 1) == 0


def power_of_2_from(n: int) -> int:
    """The least power of two >= n."""
    return 1 << (n - 1).bit_length()
