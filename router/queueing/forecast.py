"""Forecast: when a waiting request would have its answer. It is promised to nobody, but tells whom to refuse early.

    | prompts before it, in line and on workers | its own prompt | its answer |
      at the line's pace                          at a worker's    as answers have been lately

The line's pace is measured while somebody waits, so that it holds whatever held them up: prefill, pages, other routers. What a
pace says is a bound from below (router/fleet/pace.py): nobody is refused for a forecast that may be too long.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from common.errors import DeadlineExceeded, PdserveError, ResourceExhausted

MIN_NOTICE_SECONDS = 1.0
"""A caller whose deadline is nearer is not refused: its own clock tells it soon enough, and the forecast may be wrong."""
MARGIN = 1.25
"""Who would be served just in time is as likely to be served just too late, and would have taken the time of others."""
SHORTEST_RETRY, LONGEST_RETRY = timedelta(seconds=1), timedelta(seconds=60)


@dataclass(frozen=True)
class Forecast:
    """prompts_ahead, tokens_ahead: before it, in line and on workers. wait: seconds until its turn, None: unknown. service:
    seconds from then to the end of its answer."""

    prompts_ahead: int
    tokens_ahead: int
    wait: float | None
    service: float

    @property
    def retry_after(self) -> timedelta:
        """When it would be its turn, within bounds; the shortest if that is not known."""
        wait = timedelta(seconds=min(self.wait or 0.0, LONGEST_RETRY.total_seconds()))
        return max(SHORTEST_RETRY, wait)

    def why_not_wait(self, time_left: float | None) -> PdserveError | None:
        """The refusal of a newcomer that will not have its answer in time_left seconds; None if it may."""
        if self.wait is None or time_left is None or time_left < MIN_NOTICE_SECONDS:
            return None
        expected = self.wait + self.service
        if (needed := expected * MARGIN) <= time_left:
            return None
        text = (
            f"its deadline is in {time_left:.1f} s and must be at least {needed:.1f} s away: its answer is expected in "
            f"{expected:.1f} s, {self.wait:.1f} s of them for the {self.prompts_ahead} prompts of {self.tokens_ahead} tokens "
            "before it"
        )
        return ResourceExhausted(text, retry_after=self.retry_after, reason="too_late")

    def why_not_go(self, time_left: float | None) -> PdserveError | None:
        """The refusal of one that has waited, whose turn it is, and that cannot have its answer in time any more."""
        if time_left is None or self.service <= time_left:
            return None
        text = f"after its wait its deadline is in {time_left:.1f} s, and its answer takes {self.service:.1f} s"
        if time_left < MIN_NOTICE_SECONDS:
            return DeadlineExceeded(text)
        return ResourceExhausted(text, retry_after=self.retry_after, reason="too_late")
