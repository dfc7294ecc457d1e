"""Whose turn it is, and where it goes: a function of values.

The first in line for whom there is room goes. Whoever stands before and finds none (pages are what it may lack, or one of the
workers its policy prefers) is bypassed, at most MAX_BYPASS times. Then it takes any worker that takes its prompt, with pages or
without: the rest of its wait is in a decode worker's line, which nobody overtakes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from router.fleet.placement import Pair
from router.fleet.policies import Placer
from router.fleet.roster import Roster
from router.queueing.room import RoomRule
from router.queueing.waiter import Waiter

MAX_BYPASS = 16


class Turn(NamedTuple):
    """bypassed: those that stood before the waiter and stay."""

    waiter: Waiter
    pair: Pair
    bypassed: tuple[Waiter, ...]


def next_turn(leading: Sequence[Waiter], roster: Roster, *, rule: RoomRule, placer: Placer) -> Turn | None:
    """leading: the first of the line, in order."""
    is_prefill_open = any(rule.takes_prompt(worker) for worker in roster.computing)
    if not leading or not (is_prefill_open or roster.has_local):
        return None
    passed: list[Waiter] = []
    spare: Turn | None = None
    hopeless: Waiter | None = None
    for waiter in leading:
        ask, is_patient = waiter.ask, waiter.bypassed < MAX_BYPASS
        if hopeless is not None and is_patient and _asks_no_less(waiter, hopeless):
            passed.append(waiter)
            continue
        if (seats := roster.seats(ask)) is None:
            continue  # It waits for a worker to come, which is no room it could be robbed of.
        pages = waiter.pages if is_patient else None
        if (local := placer.local(seats, ask, pages=pages)) is not None:
            return Turn(waiter, local, tuple(passed))
        if not is_prefill_open:
            continue  # Whoever goes before it from here on takes no prefill worker from it.
        waits_for_home = placer.has_homes and is_patient
        if waits_for_home and rule.has_room(pair := placer.choose(seats, ask), pages=pages):
            return Turn(waiter, pair, tuple(passed))
        if (open_seats := rule.open_seats(seats, pages=pages)) is None:
            hopeless = waiter if is_patient and not ask.avoid else hopeless
            passed.append(waiter)
            continue
        if not waits_for_home:
            return Turn(waiter, placer.choose(open_seats, ask), tuple(passed))
        # Nobody idles for a preference: whoever came first takes the room that nobody prefers.
        spare = spare or Turn(waiter, placer.choose(open_seats, ask), tuple(passed))
        passed.append(waiter)
    return spare


def _asks_no_less(waiter: Waiter, hopeless: Waiter) -> bool:
    """So there is no room for it either."""
    mine, other = waiter.ask, hopeless.ask
    return mine.needs_decode is other.needs_decode and mine.pages >= other.pages and waiter.pages >= hopeless.pages
