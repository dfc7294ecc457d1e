"""Forecast: when a waiting request would have its first token. What is promised to nobody, but tells whom to refuse early.

Two measured paces: the line's (tokens of prompts that were computed while somebody waited, whatever held them up: prefill, pages,
other routers), and a worker's, for the prompt itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from common.errors import ResourceExhausted

MIN_NOTICE_SECONDS = 1.0
"""A caller whose deadline is nearer is not refused: its own clock tells it soon enough, and the forecast may be wrong."""
SHORTEST_RETRY, LONGEST_RETRY = timedelta(seconds=1), timedelta(seconds=60)


@dataclass(frozen=True)
class Forecast:
    """tokens_ahead: of prompts before it, in line and on workers; tokens: its own. Paces in tokens per second; None: unknown."""

    tokens_ahead: int
    tokens: int
    line_pace: float | None
    worker_pace: float | None

    @property
    def seconds(self) -> float | None:
        """Until its first token."""
        if self.line_pace is None:
            return None
        return self.tokens_ahead / self.line_pace + (self.tokens / self.worker_pace if self.worker_pace else 0.0)

    @property
    def retry_after(self) -> timedelta:
        """When it would have been its turn, within bounds; the shortest if that is not known."""
        wait = timedelta(seconds=min(self.seconds or 0.0, LONGEST_RETRY.total_seconds()))
        return max(SHORTEST_RETRY, wait)

    def why_too_late(self, time_left: float | None) -> ResourceExhausted | None:
        """The refusal of a request that will not have its first token in time_left seconds; None if it may."""
        seconds = self.seconds
        if seconds is None or time_left is None or time_left < MIN_NOTICE_SECONDS or seconds <= time_left:
            return None
        text = (
            f"its deadline is in {time_left:.1f} s and its first token is expected in {seconds:.1f} s: "
            f"{self.tokens_ahead} prompt tokens are before it, which take {self.line_pace:.0f} a second"
        )
        return ResourceExhausted(text, retry_after=self.retry_after, reason="too_late")
