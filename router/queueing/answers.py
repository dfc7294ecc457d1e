"""Answers: what answers have been like lately, from their first token to their last."""

from __future__ import annotations

WEIGHT = 0.05
"""Of the newest answer in the means; of the first ones more, so that all count alike."""


class Answers:
    """Exponentially weighted means over answers."""

    def __init__(self) -> None:
        self._count = self._gap_count = 0
        self._tokens = self._gap_seconds = 0.0

    def note(self, *, tokens: int, seconds: float) -> None:
        """One has ended: so many tokens, and so long after its first."""
        self._count += 1
        self._tokens += _weight(self._count) * (tokens - self._tokens)
        if tokens > 1:
            self._gap_count += 1
            self._gap_seconds += _weight(self._gap_count) * (seconds / (tokens - 1) - self._gap_seconds)

    def expected_seconds(self, limit: int) -> float:
        """From the first token to the last of an answer of at most so many tokens; 0 while none is known."""
        return max(0.0, min(limit, self._tokens) - 1) * self._gap_seconds


def _weight(count: int) -> float:
    return max(WEIGHT, 1 / count)
