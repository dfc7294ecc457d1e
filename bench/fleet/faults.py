"""Faults: a seeded stream of orders that hurt a fleet. The same seed hurts the same members in the same ways."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Final

from bench.fleet.orders import Order

MIX: Final[Mapping[str, float]] = {"kill": 0.4, "pause": 0.2, "slow": 0.2, "fail": 0.2}


class Faults:
    """seconds: how long a pause, a slowness or a share of failing transfers lasts, at most."""

    def __init__(self, names: Sequence[str], *, seed: int, mix: Mapping[str, float] = MIX, seconds: float = 0.5) -> None:
        """mix: how often each kind comes, relative to the others. A decode worker sends nothing, so it never fails to."""
        self._rng = random.Random(seed)
        self._names = list(names)
        self._senders = [name for name in names if name.startswith("prefill")]
        self._mix = dict(mix)
        self._seconds = seconds

    def next(self) -> Order:
        rng = self._rng
        (what,) = rng.choices(list(self._mix), list(self._mix.values()))
        name = rng.choice(self._senders if what == "fail" else self._names)
        lasting = rng.uniform(0.2, 1.0) * self._seconds
        degree = {"slow": (rng.uniform(2, 10),), "fail": (rng.uniform(0.1, 0.5),)}.get(what, ())
        numbers = () if what == "kill" else (*degree, lasting)
        return Order(what, name, tuple(round(number, 3) for number in numbers))
