"""How the router chooses among the workers that can take a request: one module per policy, and their table.

A policy is a function (seats, ask, state) -> (pair, state); what it remembers between calls is a value of its own. The Placer
keeps that value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from router.placement import Ask, Pair, Seats
from router.policies.least_load import least_load
from router.policies.power_of_two import power_of_two
from router.policies.prefix import prefix
from router.policies.prefix_map import PrefixMap
from router.policies.round_robin import Turn, round_robin
from router.policies.session import session

PolicyName = Literal["least_load", "power_of_two", "round_robin", "prefix", "session"]


@dataclass(frozen=True)
class Policy:
    """first_state: from 64 random bits."""

    choose: Callable[[Seats, Ask, Any], tuple[Pair, Any]]
    first_state: Callable[[int], Any] = lambda seed: None


POLICIES: dict[PolicyName, Policy] = {
    "least_load": Policy(least_load),
    "power_of_two": Policy(power_of_two, lambda seed: seed),
    "round_robin": Policy(round_robin, lambda seed: Turn()),
    "prefix": Policy(prefix, lambda seed: PrefixMap()),
    "session": Policy(session),
}


class Placer:
    """A policy with its state, from one request to the next."""

    def __init__(self, name: PolicyName, *, seed: int) -> None:
        self._policy = POLICIES[name]
        self._state = self._policy.first_state(seed)

    def choose(self, seats: Seats, ask: Ask) -> Pair:
        pair, self._state = self._policy.choose(seats, ask, self._state)
        return pair

    def left(self, worker_id: str) -> None:
        """The worker is gone."""
        if isinstance(self._state, PrefixMap):
            self._state.forget(worker_id)

    def flushed(self) -> None:
        """The workers have dropped their prefix caches."""
        if isinstance(self._state, PrefixMap):
            self._state.clear()
