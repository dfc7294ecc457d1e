"""round_robin: workers in turn, each side by itself, in order of id.

The state names who was last rather than counting, so that the turn goes on where it was when workers come and go.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from router.fleet.placement import Ask, Pair, Seats
from router.fleet.workers import Worker


class Turn(NamedTuple):
    """Ids of the workers that were last; "" before the first."""

    prefill: str = ""
    decode: str = ""


def round_robin(seats: Seats, ask: Ask, state: Turn) -> Pair:
    """A policy (router/fleet/policies)."""
    first = _next(seats.firsts, state.prefill)
    if not ask.needs_decode or first.profile.local_prefill:
        return Pair(first, first if ask.needs_decode else None)
    return Pair(first, _next(seats.decodes, state.decode))


def after_turn(pair: Pair, ask: Ask, state: Turn) -> Turn:
    """Workers that are pairs alone take turns with the prefill workers."""
    decode = state.decode if pair.decode is None or pair.is_alone else pair.decode.id
    return Turn(pair.prefill.id, decode)


def _next(workers: Sequence[Worker], last: str) -> Worker:
    return min(workers, key=lambda worker: (worker.id <= last, worker.id))
