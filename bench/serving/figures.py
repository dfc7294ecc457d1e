"""Figures: what a load's records come to, and whether an objective holds.

    ttft  from a request's time to be sent to its first token      gap   from one token to the next, over all requests
    tpot  a request's mean gap                                     e2e   to a request's end

A request that failed has been infinitely slow: it counts in every percentile but those of gaps.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from bench.serving.records import Record
from bench.serving.shots import Window

METRICS: Final = ("ttft", "gap", "tpot", "e2e")
PERCENTILES: Final = (50.0, 90.0, 99.0, 100.0)
MOST_FAILED: Final = 0.01
"""A load with a larger part of its requests failed holds no objective, whatever the gaps of the others."""


def percentile(ordered: Sequence[float] | np.ndarray[Any, Any], percent: float) -> float:
    """By nearest rank: a value that was measured, and right with infinite ones. NaN of nothing."""
    if not len(ordered):
        return math.nan
    return float(ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)])


@dataclass(frozen=True)
class Figures:
    """seconds: over which rates were counted. values: each metric's measurements in seconds, rising."""

    seconds: float
    requests: int
    failed: dict[str, int]
    input_tokens: int
    output_tokens: int
    values: dict[str, np.ndarray[Any, Any]] = field(repr=False)

    @classmethod
    def of(cls, records: Sequence[Record], window: Window | None) -> Figures:
        """Of the measured ones. window: tokens are counted within it; None: from the first sent to the last ended."""
        measured = [record for record in records if record.kind == "measured"]
        begin, end = (window.warmup, window.end) if window else _span(measured)
        counted = records if window else measured
        tokens = sum(
            count for record in counted for time, count in zip(record.times, record.counts, strict=True) if begin <= time <= end
        )
        per_request = {
            "ttft": [record.ttft for record in measured],
            "gap": [gap for record in measured for gap in record.gaps()],
            "tpot": [gap for record in measured if (gap := record.mean_gap) is not None],
            "e2e": [record.end_to_end for record in measured],
        }
        return cls(
            seconds=end - begin,
            requests=len(measured),
            failed=dict(Counter(record.error for record in measured if record.error)),
            input_tokens=sum(record.input_tokens for record in measured if not record.error),
            output_tokens=tokens,
            values={name: np.sort(np.asarray(values, dtype=float)) for name, values in per_request.items()},
        )

    def at(self, metric: str, percent: float) -> float:
        """Seconds."""
        return percentile(self.values[metric], percent)

    @property
    def failures(self) -> int:
        return sum(self.failed.values())

    @property
    def output_rate(self) -> float:
        """Tokens per second."""
        return self.output_tokens / self.seconds if self.seconds else math.nan

    def as_dict(self) -> dict[str, Any]:
        """Times in ms; None for what is infinite or was not measured."""
        spreads = {
            name: {f"p{percent:g}" if percent < 100 else "max": ms(self.at(name, percent)) for percent in PERCENTILES}
            for name in METRICS
        }
        return {
            "seconds": self.seconds,
            "requests": self.requests,
            "failed": self.failed,
            "input_tokens_per_s": self.input_tokens / self.seconds if self.seconds else None,
            "output_tokens": self.output_tokens,
            "output_tokens_per_s": self.output_rate if self.seconds else None,
            "ms": spreads,
        }


def ms(seconds: float) -> float | None:
    return round(seconds * 1e3, 3) if math.isfinite(seconds) else None


def _span(records: Sequence[Record]) -> tuple[float, float]:
    return min((record.sent for record in records), default=0.0), max((record.ended for record in records), default=0.0)


@dataclass(frozen=True)
class Slo:
    """An objective: a metric's percentile is at most limit seconds."""

    metric: str
    percent: float
    limit: float

    @classmethod
    def parse(cls, text: str) -> Slo:
        """ttft:p90:400ms, gap:p99:12ms, e2e:max:10s. Raises ValueError."""
        match = re.fullmatch(r"(\w+):(?:p(\d+(?:\.\d+)?)|max):(\d+(?:\.\d+)?)(ms|s)", text, re.ASCII)
        if match is None or match[1] not in METRICS:
            raise ValueError(f"an objective must be METRIC:pN:LIMIT like ttft:p90:400ms ({', '.join(METRICS)}), got {text!r}")
        percent = float(match[2]) if match[2] else 100.0
        if not 0 < percent <= 100:
            raise ValueError(f"an objective's percentile must be in (0, 100], got {text!r}")
        return cls(match[1], percent, float(match[3]) / (1e3 if match[4] == "ms" else 1))

    def holds(self, figures: Figures) -> bool:
        """Nothing measured is nothing held, but for gaps of single tokens."""
        value = figures.at(self.metric, self.percent)
        return value <= self.limit or (self.metric in ("gap", "tpot") and math.isnan(value))

    def __str__(self) -> str:
        shown = "max" if self.percent == 100 else f"p{self.percent:g}"
        return f"{self.metric}:{shown}:{self.limit * 1e3:g}ms"


def all_hold(slos: Sequence[Slo], figures: Figures) -> bool:
    few_failed = figures.requests > 0 and figures.failures <= MOST_FAILED * figures.requests
    return few_failed and all(slo.holds(figures) for slo in slos)
