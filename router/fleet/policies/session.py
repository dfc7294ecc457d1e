"""session: requests of one session go to the same workers, as long as those are not loaded beyond the others.

By rendezvous hashing of the session's name with bounded loads (router/fleet/policies/rendezvous.py), so several routers agree. A
request without a session goes by least_load.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from router.fleet.placement import Ask, Pair, Seats
from router.fleet.policies.least_load import least_load
from router.fleet.policies.rendezvous import home_of
from router.fleet.workers import Worker

IDLE_TOKENS = 2048
"""Prompt tokens up to which a prefill worker counts as idle: no more than a step or two."""
IDLE_FULLNESS = 0.25
"""Up to which a decode worker counts as idle: a quarter of its batch costs a step little."""


def session(seats: Seats, ask: Ask, state: None = None) -> Pair:
    """A policy (router/fleet/policies) without a state."""
    if not ask.session:
        return least_load(seats, ask)
    key = ask.session.encode()
    first = _home(key, seats.firsts, lambda worker: worker.queued_tokens, added=len(ask.prompt), floor=IDLE_TOKENS)
    if not ask.needs_decode or first.profile.local_prefill:
        return Pair(first, first if ask.needs_decode else None)
    return Pair(first, _home(key, seats.decodes, lambda worker: worker.fullness, added=0, floor=IDLE_FULLNESS))


def _home(key: bytes, workers: Sequence[Worker], load: Callable[[Worker], float], *, added: float, floor: float) -> Worker:
    chosen = home_of(key, {worker.id: load(worker) for worker in workers}, added=added, floor=floor)
    return next(worker for worker in workers if worker.id == chosen)
