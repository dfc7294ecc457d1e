"""How the router chooses among the workers that can take a request: one module per policy, and their table.

A policy is a pure function (seats, ask, state) -> pair, and one that gives the next state once that pair has got the request; for
a choice may be made for a request that has to wait. The Placer keeps the state.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from router.fleet.local_prefill import LocalPrefill
from router.fleet.placement import Ask, Pair, Seats
from router.fleet.policies.least_load import least_load
from router.fleet.policies.power_of_two import after_draws, power_of_two
from router.fleet.policies.prefix import after_prefix, prefix
from router.fleet.policies.round_robin import Turn, after_turn, round_robin
from router.fleet.policies.session import session
from router.fleet.prefix_map import PrefixMap

PolicyName = Literal["least_load", "power_of_two", "round_robin", "prefix", "session"]


@dataclass(frozen=True)
class Policy:
    """first_state: from 64 random bits. after(pair, ask, state): the next one.
    has_homes: a request does better at the chosen workers than at others, so it may be worth waiting for them a little."""

    choose: Callable[[Seats, Ask, Any], Pair]
    first_state: Callable[[int], Any] = lambda seed: None
    after: Callable[[Pair, Ask, Any], Any] = lambda pair, ask, state: state
    has_homes: bool = False


POLICIES: dict[PolicyName, Policy] = {
    "least_load": Policy(least_load),
    "power_of_two": Policy(power_of_two, lambda seed: seed, after_draws),
    "round_robin": Policy(round_robin, lambda seed: Turn(), after_turn),
    "prefix": Policy(prefix, lambda seed: PrefixMap(), after_prefix, has_homes=True),
    "session": Policy(session, has_homes=True),
}


class Placer:
    """A policy with its state, from one request to the next, and the rule for prompts that need no prefill worker."""

    def __init__(self, name: PolicyName, *, seed: int, local: LocalPrefill | None = None) -> None:
        """local: None: no decode worker is used that way."""
        self._policy = POLICIES[name]
        self._local = local or LocalPrefill(queue_tokens=sys.maxsize)
        self._state = self._policy.first_state(seed)

    @property
    def has_homes(self) -> bool:
        return self._policy.has_homes

    def choose(self, seats: Seats, ask: Ask) -> Pair:
        return self._policy.choose(seats, ask, self._state)

    def local(self, seats: Seats, ask: Ask, *, pages: int | None) -> Pair | None:
        """The decode worker, twice, that is to compute the prompt itself, whatever the policy; see LocalPrefill.pair_for."""
        return self._local.pair_for(seats, ask, pages=pages)

    def took(self, pair: Pair, ask: Ask) -> None:
        """The chosen pair has got the request."""
        self._local.took(pair, ask)
        if pair.prefill.computes_prompts:
            self._state = self._policy.after(pair, ask, self._state)

    def left(self, worker_id: str) -> None:
        """The worker is gone."""
        self._local.left(worker_id)
        if isinstance(self._state, PrefixMap):
            self._state.forget(worker_id)

    def flushed(self) -> None:
        """The workers have dropped their prefix caches."""
        self._local.flushed()
        if isinstance(self._state, PrefixMap):
            self._state.clear()
