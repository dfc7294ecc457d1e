"""Philox4x32-10, a counter-based random generator: a number is a pure function of (key, counter), so a draw depends on
nothing but the names of what it is for, and any worker can make it again.

J. K. Salmon, M. A. Moraes, R. O. Dror, D. E. Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", SC '11,
doi:10.1145/2063384.2063405, section 3.4.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)

Words = NDArray[np.uint64]
"""32-bit words, held in uint64 so that their products fit."""


def philox4x32(counter: Sequence[Words], key: Sequence[Words]) -> tuple[Words, Words, Words, Words]:
    """Four random words for each (counter: 4 words, key: 2 words); all arrays of one shape."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (product1 >> _HALF) ^ c1 ^ k0, product1 & _LOW, (product0 >> _HALF) ^ c3 ^ k1, product0 & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3


def uniforms(draws: Sequence[tuple[int, int, int]]) -> list[float]:
    """One number in (0, 1) for each (seed: 64 bits, completion, output index)."""
    seeds, completions, indices = (np.array(column, dtype=np.uint64) for column in zip(*draws, strict=True))
    zeros = np.zeros_like(seeds)
    words = philox4x32((indices & _LOW, completions & _LOW, zeros, zeros), (seeds & _LOW, seeds >> _HALF))
    values: list[float] = ((words[0].astype(np.float64) + 0.5) * 2.0**-32).tolist()
    return values
