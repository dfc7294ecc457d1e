"""Pace: how many tokens a second come out of something while there is work in it."""

from __future__ import annotations

HALF_LIFE_SECONDS = 10.0
"""Of busy time after which what was measured counts half."""
MIN_BUSY_SECONDS = 2.0
"""Measured for less, nothing is said: the first requests of a burst pay for what is opened and warmed."""


class Pace:
    """An average over busy time alone: an idle worker is no slow one."""

    def __init__(self) -> None:
        self._tokens = self._seconds = 0.0
        self._at = 0.0
        self._is_busy = False

    def note(self, now: float, *, is_busy: bool, tokens: int = 0) -> None:
        """tokens have come out just now; they count if it was busy. is_busy: from now on until the next call. now: seconds of a
        clock that never goes back."""
        if self._is_busy:
            passed = now - self._at
            fade = 0.5 ** (passed / HALF_LIFE_SECONDS)
            self._seconds = self._seconds * fade + passed
            self._tokens = self._tokens * fade + tokens
        self._at, self._is_busy = now, is_busy

    @property
    def rate(self) -> float | None:
        """Tokens per second; None while too little was measured."""
        return self._tokens / self._seconds if self._seconds >= MIN_BUSY_SECONDS and self._tokens > 0 else None
