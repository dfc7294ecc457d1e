"""Pace: how many prompts and tokens a second come out of something while there is work in it.

What a prompt costs for being one and what each of its tokens costs is not told apart: hundreds of tiny prompts say nothing of how
fast a long one is computed. So what is said is a bound that holds whatever the shares: if R prompts of N tokens took T seconds,
r prompts of n tokens take at least T min(r / R, n / N).
"""

from __future__ import annotations

HALF_LIFE_SECONDS = 10.0
"""Of busy time after which what was measured counts half."""
MIN_BUSY_SECONDS = 2.0
"""Measured for less, nothing is said: the first requests of a burst pay for what is opened and warmed."""
MIN_PROMPTS = 4
"""Nor of fewer prompts than that."""


class Pace:
    """An average over busy time alone: an idle worker is no slow one."""

    def __init__(self) -> None:
        self._prompts = self._tokens = self._seconds = 0.0
        self._at = 0.0
        self._is_busy = False

    def note(self, now: float, *, is_busy: bool, prompts: int = 0, tokens: int = 0) -> None:
        """prompts of so many tokens together have come out just now; they count if it was busy. is_busy: from now on until the
        next call. now: seconds of a clock that never goes back."""
        if self._is_busy:
            passed = now - self._at
            fade = 0.5 ** (passed / HALF_LIFE_SECONDS)
            self._seconds = self._seconds * fade + passed
            self._prompts = self._prompts * fade + prompts
            self._tokens = self._tokens * fade + tokens
        self._at, self._is_busy = now, is_busy

    def seconds_for(self, *, prompts: int, tokens: int) -> float | None:
        """At least so many; None while too little was measured."""
        if self._seconds < MIN_BUSY_SECONDS or self._prompts < MIN_PROMPTS or self._tokens <= 0:
            return None
        return self._seconds * min(prompts / self._prompts, tokens / self._tokens)
