"""Who may take a request: the workers that are there, sorted by what they can do for it. Functions of values.

Which of them takes it is a policy's choice (router/fleet/policies). A worker with local_prefill is a pair alone and no part of
another.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from router.fleet.prompt_blocks import NO_PROMPT, PromptBlocks
from router.fleet.workers import Worker


class Ask(NamedTuple):
    """What a request needs, and what a policy may go by.

    pages: that its prompt and whole output take in either pool.
    needs_decode: False if the prefill worker makes its only token.
    avoid: ids of workers that failed earlier attempts; used again only if there is nobody else.
    prompt: the client's. session: the caller's name for what belongs together; "" for none.
    """

    pages: int
    needs_decode: bool = True
    avoid: frozenset[str] = frozenset()
    prompt: PromptBlocks = NO_PROMPT
    session: str = ""


class Pair(NamedTuple):
    """decode is None if none is needed, and the same worker as prefill if that does both."""

    prefill: Worker
    decode: Worker | None

    @property
    def is_alone(self) -> bool:
        return self.decode is self.prefill

    @property
    def workers(self) -> tuple[Worker, ...]:
        """Each once."""
        return tuple(dict.fromkeys(worker for worker in self if worker is not None))

    @property
    def ids(self) -> frozenset[str]:
        return frozenset(worker.id for worker in self if worker is not None)


class Seats(NamedTuple):
    """The workers that can take one request, in order of id; any choice among them is right, and there is at least one.

    prefills: compute its prompt for any of decodes; if no decode worker is needed, by themselves. Empty without them.
    decodes: empty if none is needed.
    alone: do both.
    """

    prefills: tuple[Worker, ...]
    decodes: tuple[Worker, ...]
    alone: tuple[Worker, ...]

    @classmethod
    def of(
        cls, prefills: tuple[Worker, ...], decodes: tuple[Worker, ...], alone: tuple[Worker, ...], *, needs_decode: bool
    ) -> Seats | None:
        """None if there is no choice."""
        if needs_decode and not (prefills and decodes):
            prefills, decodes = (), ()
        return cls(prefills, decodes, alone) if prefills or alone else None

    @property
    def firsts(self) -> tuple[Worker, ...]:
        """Whoever may compute the prompt."""
        return self.prefills + self.alone

    def without(self, avoid: frozenset[str]) -> Seats | None:
        """Those that are left without some workers; None if nobody is."""

        def fresh(group: tuple[Worker, ...]) -> tuple[Worker, ...]:
            return tuple(worker for worker in group if worker.id not in avoid)

        return Seats.of(fresh(self.prefills), fresh(self.decodes), fresh(self.alone), needs_decode=bool(self.decodes))


def placeable(workers: Iterable[Worker]) -> list[Worker]:
    """In order of id."""
    return sorted((worker for worker in workers if worker.is_placeable), key=lambda worker: worker.id)


def seats_for(workers: Iterable[Worker], ask: Ask) -> Seats | None:
    """None while there is no placeable worker of a needed role whose pool can hold the request."""
    return seats_among(placeable(workers), ask)


def seats_among(workers: Sequence[Worker], ask: Ask) -> Seats | None:
    """The same of workers that are placeable and in order of id."""
    usable = [worker for worker in workers if worker.profile.total_pages >= ask.pages]
    alone = tuple(worker for worker in usable if worker.profile.local_prefill)
    prefills = tuple(worker for worker in usable if worker.role == "prefill")
    decodes = tuple(worker for worker in usable if worker.role == "decode" and not worker.profile.local_prefill)
    found = Seats.of(prefills, decodes if ask.needs_decode else (), alone, needs_decode=ask.needs_decode)
    if found is None or not ask.avoid:
        return found
    return found.without(ask.avoid) or _least_bad(found, ask.avoid)


def _least_bad(seats: Seats, avoid: frozenset[str]) -> Seats:
    """Every choice has somebody to avoid in it: only where there is nobody else."""
    if not seats.prefills:
        return seats
    prefills, decodes = (tuple(worker for worker in group if worker.id not in avoid) for group in seats[:2])
    return Seats(prefills or seats.prefills, decodes or seats.decodes, seats.alone)
