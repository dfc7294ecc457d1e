"""What can be asked of a system: a load as it comes, its goodput, everything at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from bench.serving.bench import Bench, Measured, say
from bench.serving.figures import Figures, Slo, all_hold
from bench.serving.goodput import highest_that_holds
from bench.serving.lengths import Lengths
from bench.serving.shots import Shot, Window, at_once, open_loop


@dataclass(frozen=True)
class Load:
    """Requests as they come, but for their rate."""

    inputs: Lengths
    outputs: Lengths
    window: Window
    seed: int

    def at(self, rate: float) -> list[Shot]:
        return open_loop(rate, self.window, inputs=self.inputs, outputs=self.outputs, seed=self.seed)


def run_rates(bench: Bench, load: Load, rates: Sequence[float]) -> list[Measured]:
    return [bench.measure(f"{rate:g}/s", load.at(rate), window=load.window, rate=rate) for rate in rates]


@dataclass
class Goodput:
    """best: for each list of objectives, the highest rate at which they all hold; None: not even the lowest."""

    measured: list[Measured] = field(default_factory=list)
    best: list[tuple[list[Slo], float | None]] = field(default_factory=list)

    def as_dict(self) -> list[dict[str, Any]]:
        return [{"slo": [str(slo) for slo in slos], "requests_per_s": rate} for slos, rate in self.best]


def find_goodput(bench: Bench, load: Load, *, grid: Sequence[float], objectives: Sequence[list[Slo]]) -> Goodput:
    """Each rate is measured at most once, whichever objectives ask for it. A search starts where the last one ended."""
    found: dict[int, Measured] = {}

    def figures(index: int) -> Figures:
        if index not in found:
            found[index] = run_rates(bench, load, [grid[index]])[0]
        return found[index].figures

    result, start = Goodput(), 0
    for slos in objectives:
        best = highest_that_holds(len(grid), lambda index: all_hold(slos, figures(index)), start=start)  # noqa: B023
        start = best or 0
        result.best.append((slos, None if best is None else grid[best]))
        shown = "not even the lowest rate" if best is None else f"{grid[best]:g} requests/s"
        say(f"{bench.system}: {', '.join(map(str, slos))}: {shown}")
    result.measured = [found[index] for index in sorted(found)]
    return result


def run_offline(bench: Bench, *, requests: int, inputs: Lengths, outputs: Lengths, warmup: int) -> Measured:
    """All at once, until all have ended. warmup: requests of the same kind before, measured nowhere."""
    if warmup:
        bench.shoot(at_once(warmup, inputs=inputs, outputs=Lengths("fixed", 8, 8), seed=bench.seed + 1))
    shots = at_once(requests, inputs=inputs, outputs=outputs, seed=bench.seed)
    return replace(bench, drain=bench.timeout).measure(f"{requests} at once", shots, window=None)


def sweep(objectives: Sequence[Slo], limits: Sequence[Slo]) -> list[list[Slo]]:
    """The objectives, with each of the limits in turn in place of that of the same metric and percentile."""
    if not limits:
        return [list(objectives)]
    swept = {(limit.metric, limit.percent) for limit in limits}
    others = [slo for slo in objectives if (slo.metric, slo.percent) not in swept]
    return [[*others, limit] for limit in sorted(limits, key=lambda slo: slo.limit)]
