"""Shots: which request is sent when. Pure: the same seed gives the same load.

An open-loop load, on the axis of its arrivals:

    0           warmup               warmup + seconds        + tail
    |  warm      |  measured          |  tail                 |
                                                             '-- ends as soon as the last measured request is answered

What is warm or tail keeps the load up and is measured nowhere.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bench.serving.lengths import Lengths

Kind = Literal["warm", "measured", "tail", "stream"]


@dataclass(frozen=True)
class Shot:
    """at: seconds after the start. kind stream: runs until the end of the load and is cut there."""

    at: float
    input_tokens: int
    output_tokens: int
    kind: Kind = "measured"


@dataclass(frozen=True)
class Window:
    """The measured part of a load, in seconds after its start."""

    warmup: float
    seconds: float
    tail: float = 0.0

    @property
    def end(self) -> float:
        return self.warmup + self.seconds

    def kind_at(self, at: float) -> Kind:
        return "warm" if at < self.warmup else "measured" if at < self.end else "tail"


def poisson(rate: float, *, until: float, rng: random.Random, start: float = 0.0) -> Iterator[float]:
    """Arrival times from start to until, independent of each other, rate per second on average."""
    at = start
    while (at := at + rng.expovariate(rate)) < until:
        yield at


def open_loop(rate: float, window: Window, *, inputs: Lengths, outputs: Lengths, seed: int) -> list[Shot]:
    rng = random.Random(seed)
    times = poisson(rate, until=window.end + window.tail, rng=rng)
    return [Shot(at, inputs.draw(rng), outputs.draw(rng), window.kind_at(at)) for at in times]


def at_once(count: int, *, inputs: Lengths, outputs: Lengths, seed: int) -> list[Shot]:
    """A closed load: everything is there from the start."""
    rng = random.Random(seed)
    return [Shot(0.0, inputs.draw(rng), outputs.draw(rng)) for _ in range(count)]


def streams(count: int, *, inputs: Lengths, outputs: Lengths, seed: int) -> list[Shot]:
    rng = random.Random(seed)
    return [Shot(0.0, inputs.draw(rng), outputs.draw(rng), "stream") for _ in range(count)]


def read_trace(path: Path, window: Window | None = None) -> list[Shot]:
    """A JSON object per line: {"at": seconds, "input": tokens, "output": tokens}. Without a window everything is measured.
    Raises ValueError naming the line."""
    shots = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            at, given, asked = float(entry["at"]), int(entry["input"]), int(entry["output"])
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f'{path}:{number}: must be {{"at": s, "input": tokens, "output": tokens}}: {error}') from None
        if at < 0 or given < 1 or asked < 1:
            raise ValueError(f"{path}:{number}: at must be at least 0, input and output at least 1, got {line.strip()}")
        shots.append(Shot(at, given, asked, "measured" if window is None else window.kind_at(at)))
    return sorted(shots, key=lambda shot: shot.at)


def dealt(shots: Sequence[Shot], hands: int) -> list[list[Shot]]:
    """The shots in turn to so many clients."""
    return [list(shots[hand::hands]) for hand in range(hands)]
