"""Interference: what prompts that arrive do to the gaps of streams that run.

    0          warmup                     warmup + seconds
    | streams   | gaps are measured here   | the last prompts end, then all is cut
    | begin     | prompts arrive (2nd run) |

Two runs with the same streams, without prompts and with them: a gap's length depends on how long the streams are by then.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bench.serving.bench import Bench, Measured, say
from bench.serving.figures import Figures, percentile
from bench.serving.lengths import Lengths
from bench.serving.modes import run_offline
from bench.serving.records import Record
from bench.serving.shots import Shot, Window, poisson, streams

SETTLE_SECONDS = 2.0
"""For the last prompts to be answered in; nothing is measured any more."""


@dataclass(frozen=True)
class Streams:
    """count streams that run all the while; prompts of a length come for very few tokens."""

    count: int
    inputs: Lengths
    outputs: Lengths
    prompt: Lengths
    prompt_outputs: Lengths
    window: Window
    capacity_prompts: int = 24


@dataclass(frozen=True)
class Interference:
    """gaps: of the streams, in seconds, rising. running: streams that gave tokens in the window."""

    system: str
    rate: float
    capacity: float | None
    alone: np.ndarray[Any, Any] = field(repr=False)
    beside: np.ndarray[Any, Any] = field(repr=False)
    running: tuple[int, int]
    prompts: Measured

    def ratio(self, percent: float) -> float:
        alone = percentile(self.alone, percent)
        return percentile(self.beside, percent) / alone if alone else math.nan

    def as_dict(self) -> dict[str, Any]:
        spread = {
            f"p{percent:g}": {
                "alone_ms": percentile(self.alone, percent) * 1e3,
                "beside_ms": percentile(self.beside, percent) * 1e3,
                "ratio": self.ratio(percent),
            }
            for percent in (50.0, 90.0, 99.0, 99.9)
            if len(self.alone) and len(self.beside)
        }
        gaps = {"system": self.system, "rate": self.rate, "capacity": self.capacity, "running": self.running, "gaps": spread}
        return gaps | {"prompts": self.prompts.as_dict()}


def run_interference(bench: Bench, load: Streams, *, rate: float | None, share: float) -> Interference:
    """The streams' gaps within the window, without prompts and then with them at rate (None: at share of what the system takes of
    prompts alone). Both runs have the same streams, so the same lengths at the same time."""
    capacity = None if rate is not None else _capacity(bench, load)
    chosen = rate if rate is not None else share * (capacity or 0.0)
    running = streams(load.count, inputs=load.inputs, outputs=load.outputs, seed=bench.seed)
    arrivals = poisson(chosen, start=load.window.warmup, until=load.window.end, rng=random.Random(bench.seed))
    draw = random.Random(bench.seed + 1)
    prompts = [Shot(at, load.prompt.draw(draw), load.prompt_outputs.draw(draw)) for at in arrivals]
    end = load.window.end + SETTLE_SECONDS
    before = bench.shoot(running, cut_at=end)
    after = bench.shoot([*running, *prompts], cut_at=end)
    measured = Measured(bench.system, f"prompts at {chosen:.3g}/s", Figures.of(after.records, load.window), after.health, chosen)
    result = Interference(
        system=bench.system,
        rate=chosen,
        capacity=capacity,
        alone=_gaps(before.records, load.window),
        beside=_gaps(after.records, load.window),
        running=(_running(before.records, load.window), _running(after.records, load.window)),
        prompts=measured,
    )
    alone_ms, beside_ms = (percentile(gaps, 99) * 1e3 for gaps in (result.alone, result.beside))
    say(f"{bench.system}: gap p99 {alone_ms:.2f} ms alone, {beside_ms:.2f} ms beside prompts")
    return result


def _capacity(bench: Bench, load: Streams) -> float:
    """Prompts per second when there is nothing else: so many at once, by the time the last one took."""
    measured = run_offline(bench, requests=load.capacity_prompts, inputs=load.prompt, outputs=load.prompt_outputs, warmup=2)
    return (measured.figures.requests - measured.figures.failures) / measured.figures.seconds


def _gaps(records: Sequence[Record], window: Window) -> np.ndarray[Any, Any]:
    gaps = [gap for record in records if record.kind == "stream" for gap in record.gaps(window.warmup, window.end)]
    return np.sort(np.asarray(gaps, dtype=float))


def _running(records: Sequence[Record], window: Window) -> int:
    """Streams that had begun when the window did and gave tokens until close to its end."""
    late = window.end - 0.1 * window.seconds
    ran = (record for record in records if record.kind == "stream" and record.times and not record.error)
    return sum(record.times[0] <= window.warmup and record.times[-1] >= late for record in ran)
