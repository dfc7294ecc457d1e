"""Answers: what answers have been like lately, from their first token to their last.

first token --hand-off--> at the decode worker --a place in its batch--> second token --a gap each--> last token
"""

from __future__ import annotations

from typing import NamedTuple

WEIGHT = 0.05
"""Of the newest answer in the means; of the first ones more, so that all count alike."""
LONGEST_HANDOFF_SECONDS = 1.0
"""A hand-off counts for no more: a transfer that stalls is a fault, which says nothing of the next one's."""
STEP_SECONDS = 0.5
"""A place that is free takes no longer than a step to get, which is less than this; beyond it others had to leave first."""


class Answer(NamedTuple):
    """One that has ended. handoff_seconds: from its first token until its decode worker had it; place_seconds: from there to the
    second; rest_seconds: from there to the last. Of a single token they do not count."""

    tokens: int
    handoff_seconds: float
    place_seconds: float
    rest_seconds: float


class Answers:
    """Exponentially weighted means over answers."""

    def __init__(self) -> None:
        self._tokens, self._handoff, self._place, self._gap = Mean(), Mean(), Mean(), Mean()

    def note(self, answer: Answer) -> None:
        """answer: one that no fault has held up."""
        self._tokens.note(answer.tokens)
        if answer.tokens > 1:
            self._handoff.note(min(answer.handoff_seconds, LONGEST_HANDOFF_SECONDS))
            self._place.note(answer.place_seconds)
        if answer.tokens > 2:
            self._gap.note(answer.rest_seconds / (answer.tokens - 2))

    @property
    def waits_for_places(self) -> bool:
        """Places in batches were not free lately."""
        return self._place.value > STEP_SECONDS

    def forget_places(self) -> None:
        """One is free now: how long others waited says nothing of who comes next."""
        self._place = Mean()

    def expected_seconds(self, limit: int) -> float:
        """From the first token to the last of an answer of at most so many tokens; 0 while none is known."""
        later = max(0.0, min(limit, self._tokens.value) - 1)
        # Where most have a single token a mean between one and two says how many come to a decode worker at all.
        return min(1.0, later) * (self._handoff.value + self._place.value) + max(0.0, later - 1) * self._gap.value


class Mean:
    """0 at first."""

    def __init__(self) -> None:
        self.value = 0.0
        self._count = 0

    def note(self, value: float) -> None:
        self._count += 1
        self.value += max(WEIGHT, 1 / self._count) * (value - self.value)
