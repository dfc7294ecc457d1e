"""power_of_two: of two workers drawn at random the less loaded, for each side.

Nearly as even as asking everybody, and without the herd: routers that see the same reports half a second late do not all send to
the same worker. (Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing", IEEE TPDS 12(10), 2001.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from router.fleet.placement import Ask, Pair, Seats
from router.fleet.policies.least_load import prefill_load
from router.fleet.workers import Worker, decode_load

MASK = (1 << 64) - 1


def power_of_two(seats: Seats, ask: Ask, state: int) -> Pair:
    """A policy (router/fleet/policies). state: of the random numbers, 64 bits."""
    bits, state = draw(state)
    first = _of_two(seats.firsts, prefill_load, bits)
    if not ask.needs_decode or first.profile.local_prefill:
        return Pair(first, first if ask.needs_decode else None)
    bits, _ = draw(state)
    return Pair(first, _of_two(seats.decodes, decode_load, bits))


def after_draws(pair: Pair, ask: Ask, state: int) -> int:
    return draw(draw(state)[1])[1]


def draw(state: int) -> tuple[int, int]:
    """64 random bits and the next state: splitmix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators",
    OOPSLA 2014)."""
    state = (state + 0x9E3779B97F4A7C15) & MASK
    z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31), state


def _of_two(workers: Sequence[Worker], load: Callable[[Worker], Any], bits: int) -> Worker:
    """Two different ones, where there are two."""
    if len(workers) == 1:
        return workers[0]
    one = (bits >> 32) % len(workers)
    other = (one + 1 + (bits & 0xFFFFFFFF) % (len(workers) - 1)) % len(workers)
    return min(workers[one], workers[other], key=load)
