"""Line: who waits, in the order of their turns.

Higher priority goes first. Among equals tenants share the prompt tokens evenly: start-time fair queueing (Goyal, Vin and Cheng,
"Start-time Fair Queuing", IEEE/ACM ToN 5(5), 1997). A waiter's start tag is the later of its tenant's last finish tag and the tag
of whoever went last; its finish tag is as many tokens later; the earliest start goes first, then the lowest uid. One tenant alone
is served in order of arrival. A tenant that was idle earns no claim for that time.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import attrgetter

from router.queueing.waiter import Place, Waiter

KEPT_TENANTS = 64
"""Tenants with nobody in line whose finish tags a level keeps; beyond it all those are forgiven what they had."""


@dataclass
class _Tenant:
    """finish: the last finish tag. waiting: how many are in line; new: of these, that have not begun."""

    finish: float = 0.0
    waiting: int = 0
    new: int = 0


@dataclass
class _Level:
    """Those of one priority. virtual: the start tag of whoever went last."""

    virtual: float
    waiting: int = 0
    tenants: dict[str, _Tenant] = field(default_factory=dict)


class Line:
    """A data structure without a clock. Insertion moves references in a list: right for some thousands of waiters."""

    def __init__(self) -> None:
        self._waiters: list[Waiter] = []
        self._levels: dict[int, _Level] = {}
        self.prompts = self.tokens = 0
        """In line that have not begun, and the tokens of these."""
        self._latest = 0.0
        """No finish tag is later. Where an empty level begins again, so that whoever comes back keeps its place."""

    def __len__(self) -> int:
        return len(self._waiters)

    def __contains__(self, waiter: Waiter) -> bool:
        at = bisect_left(self._waiters, waiter.place, key=_place) if waiter.place is not None else len(self)
        return at < len(self) and self._waiters[at] is waiter

    def leading(self, count: int) -> Sequence[Waiter]:
        """The first ones, in order, but for those that wait for a worker to come: they take no room from anybody."""
        return list(islice((waiter for waiter in self._waiters if waiter.search is None), count))

    def all(self) -> Sequence[Waiter]:
        return list(self._waiters)

    def add(self, waiter: Waiter) -> None:
        """At its place, or at a new one, if it has none yet."""
        level = self._levels.get(waiter.priority)
        if level is None:
            level = self._levels[waiter.priority] = _Level(self._latest)
        tenant = level.tenants.setdefault(waiter.tenant, _Tenant())
        if waiter.place is None:
            start = max(level.virtual, tenant.finish)
            tenant.finish = _finish(start, waiter)
            self._latest = max(self._latest, tenant.finish)
            waiter.place = Place(-waiter.priority, start, waiter.uid)
        self.prompts += not waiter.is_begun
        self.tokens += 0 if waiter.is_begun else waiter.tokens
        tenant.waiting += 1
        tenant.new += not waiter.is_begun
        level.waiting += 1
        insort(self._waiters, waiter, key=_place)

    def remove(self, waiter: Waiter, *, goes: bool) -> None:
        """goes: it has its turn; else it leaves without. Raises AssertionError unless it is in line."""
        assert waiter.place is not None and waiter in self, f"{waiter.uid} is not in line"
        del self._waiters[bisect_left(self._waiters, waiter.place, key=_place)]
        level = self._levels[waiter.priority]
        tenant = level.tenants[waiter.tenant]
        self.prompts -= not waiter.is_begun
        self.tokens -= 0 if waiter.is_begun else waiter.tokens
        tenant.waiting -= 1
        tenant.new -= not waiter.is_begun
        level.waiting -= 1
        if goes:
            level.virtual = max(level.virtual, waiter.place.start)
        elif tenant.finish == _finish(waiter.place.start, waiter):
            tenant.finish = waiter.place.start  # What it did not get is not charged.
        if level.waiting == 0:
            del self._levels[waiter.priority]
        elif len(level.tenants) > KEPT_TENANTS + level.waiting:
            level.tenants = {name: tenant for name, tenant in level.tenants.items() if tenant.waiting}

    def ahead_of(self, waiter: Waiter) -> tuple[int, int]:
        """Prompts before this one, which is in line, that have not begun, and the tokens of these."""
        before = self._waiters[: bisect_left(self._waiters, waiter.place, key=_place)]
        tokens = [other.tokens for other in before if not other.is_begun]
        return len(tokens), sum(tokens)

    def displaceable_for(self, priority: int, tenant: str) -> Waiter | None:
        """Whoever should give up its place to a newcomer, because it has less of a right to it: of those that have not begun, of
        the lowest priority, of the tenant with the most there (which must be more than the newcomer's would have), the last. None
        if the newcomer has not more of a right than anybody."""
        last = next((waiter for waiter in reversed(self._waiters) if not waiter.is_begun), None)
        if last is None or priority < last.priority:
            return None
        tenants = self._levels[last.priority].tenants
        heaviest = max(tenants, key=lambda name: tenants[name].new)
        if priority == last.priority:
            own = tenants[tenant].new if tenant in tenants else 0
            if tenants[heaviest].new <= own + 1:
                return None
        return next(waiter for waiter in reversed(self._waiters) if waiter.tenant == heaviest and not waiter.is_begun)


def _finish(start: float, waiter: Waiter) -> float:
    return start + max(1, waiter.tokens)


_place = attrgetter("place")
