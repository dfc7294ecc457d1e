"""Vigil: how long somebody has said nothing, judged by a listener that may itself have been held up."""

from __future__ import annotations


class Vigil:
    """Of one silence. look() at regular moments. A look that comes late means that we did not listen meanwhile: it counts as
    little more than one in time, so that our own pause (a stopped process, a long garbage collection) is not the other's
    silence."""

    def __init__(self, *, tick_seconds: float, now: float) -> None:
        """tick_seconds: between two looks, if nothing comes between."""
        self._longest = 1.5 * tick_seconds
        self._looked_at = now
        self._silent_seconds = 0.0

    def look(self, now: float) -> float:
        """Seconds of silence so far."""
        self._silent_seconds += min(now - self._looked_at, self._longest)
        self._looked_at = now
        return self._silent_seconds
