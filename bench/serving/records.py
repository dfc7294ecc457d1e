"""Record: what one request saw. Times are seconds after the load's start."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from bench.serving.shots import Kind


@dataclass
class Record:
    """at: when it was to be sent; sent: when it was. times, counts: when each delta came, and its tokens.
    error: a gRPC status, or unfinished: it still ran when the load was over. was_cut: ended by us, as was planned."""

    kind: Kind
    at: float
    input_tokens: int
    asked_tokens: int
    sent: float = 0.0
    ended: float = 0.0
    times: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    error: str = ""
    was_cut: bool = False

    @property
    def tokens(self) -> int:
        return sum(self.counts)

    @property
    def ttft(self) -> float:
        """From when it was to be sent, so that a late client shows (and is told of); infinite if it failed."""
        return self.times[0] - self.at if self.times and not self.error else math.inf

    @property
    def end_to_end(self) -> float:
        return math.inf if self.error else self.ended - self.at

    @property
    def mean_gap(self) -> float | None:
        """None with a single token. Infinite if it failed."""
        if self.error:
            return math.inf
        return (self.times[-1] - self.times[0]) / (self.tokens - 1) if self.tokens > 1 else None

    def gaps(self, start: float = 0.0, end: float = math.inf) -> Iterator[float]:
        """Between a token and the one before, of tokens that came in [start, end). Those of one delta came together: zero."""
        before: float | None = None
        for time, count in zip(self.times, self.counts, strict=True):
            if start <= time < end:
                if before is not None:
                    yield time - before
                for _ in range(count - 1):
                    yield 0.0
            before = time

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)
