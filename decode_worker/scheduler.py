"""The decode scheduler: who steps, who joins the batch, who gets a page, who has to give its pages up. A function of values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from decode_worker.precedence import Precedence


class Schedulable(Protocol):
    """What the scheduler asks of a completion."""

    @property
    def precedence(self) -> Precedence: ...

    @property
    def needs_page(self) -> bool: ...


C = TypeVar("C", bound=Schedulable)


@dataclass(frozen=True)
class Retract(Generic[C]):
    """Give this one back to its router first, then plan again."""

    victim: C


@dataclass(frozen=True)
class Step(Generic[C]):
    """batch: steps now, in order. grow: those of it that get a page first. starved: would step, but there is no page for them."""

    batch: list[C]
    grow: list[C]
    starved: list[C]


def plan(running: Sequence[C], committed: Sequence[C], *, places: int, available: int) -> Retract[C] | Step[C]:
    """The next step.

    running, committed: each in order; all of the running may step, and the first of the committed join, as many as there are
    places. available: pages to be had.
    The oldest is served first. When it lacks a page, the youngest of all gives way, which may be the one that lacks it. The
    oldest never gives way, so that somebody always advances: without a page it waits until one comes (from a ticket that is
    still being filled, or from quarantine).
    """
    everybody = sorted([*running, *committed], key=lambda completion: completion.precedence)
    taking_part = sorted([*running, *committed[:places]], key=lambda completion: completion.precedence)
    step = Step[C]([], [], [])
    for completion in taking_part:
        if completion.needs_page:
            if available == 0 and len(everybody) > 1:
                return Retract(everybody[-1])
            if available == 0:
                step.starved.append(completion)
                continue
            available -= 1
            step.grow.append(completion)
        step.batch.append(completion)
    return step
