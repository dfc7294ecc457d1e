"""Answers: what answers have been like lately, from their first token to their last."""

from __future__ import annotations

WEIGHT = 0.05
"""Of the newest answer in the means; of the first ones more, so that all count alike."""
LONGEST_HANDOFF_SECONDS = 1.0
"""A hand-off counts for no more: a transfer that stalls is a fault, which says nothing of the next one's."""


class Answers:
    """Exponentially weighted means over answers."""

    def __init__(self) -> None:
        self._count = self._gap_count = 0
        self._tokens = self._gap_seconds = self._handoff_seconds = 0.0

    def note(self, *, tokens: int, handoff_seconds: float, seconds: float) -> None:
        """One has ended that no fault has held up: so many tokens. handoff_seconds: from its first token until its decode worker
        had it; seconds: from there to the last."""
        self._count += 1
        self._tokens += _weight(self._count) * (tokens - self._tokens)
        if tokens > 1:
            self._gap_count += 1
            weight = _weight(self._gap_count)
            self._gap_seconds += weight * (seconds / (tokens - 1) - self._gap_seconds)
            self._handoff_seconds += weight * (min(handoff_seconds, LONGEST_HANDOFF_SECONDS) - self._handoff_seconds)

    def expected_seconds(self, limit: int) -> float:
        """From the first token to the last of an answer of at most so many tokens; 0 while none is known."""
        later = max(0.0, min(limit, self._tokens) - 1)
        return self._handoff_seconds + later * self._gap_seconds if later else 0.0


def _weight(count: int) -> float:
    return max(WEIGHT, 1 / count)
