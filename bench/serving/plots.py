"""PNG plots, if matplotlib is there (the extra "bench")."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.serving.bench import Measured, say
from bench.serving.figures import Slo
from bench.serving.interference import Interference

MOST_CURVES = 8


def can_plot() -> bool:
    """Says so if not."""
    if importlib.util.find_spec("matplotlib") is None:
        say("no plots: matplotlib is not installed (pip install '.[bench]')")
        return False
    return True


def plot_loads(measured: Sequence[Measured], path: Path) -> None:
    """The distribution of time to first token and of gaps, a curve per load."""
    figure, (left, right) = _axes(2)
    for each in measured[-MOST_CURVES:]:
        label = f"{each.system} {each.label}"
        _cdf(left, each.figures.values["ttft"], label)
        _cdf(right, each.figures.values["gap"], label)
    _finish(figure, [(left, "time to first token, ms"), (right, "gap between tokens, ms")], path)


def plot_rates(measured: Sequence[Measured], slos: Sequence[Slo], path: Path) -> None:
    """p90 time to first token and p99 gap over the request rate, a curve per system, with the objectives as lines."""
    figure, axes = _axes(2)
    for axis, metric, percent in zip(axes, ("ttft", "gap"), (90, 99), strict=True):
        for system in dict.fromkeys(each.system for each in measured):
            points = sorted(
                (each.rate, each.figures.at(metric, percent) * 1e3) for each in measured if each.system == system and each.rate
            )
            axis.plot([rate for rate, _ in points], [value for _, value in points], marker="o", label=system)
        for slo in slos:
            if slo.metric == metric:
                axis.axhline(slo.limit * 1e3, linestyle="--", linewidth=0.8, color="grey")
        axis.set(xlabel="requests per second", ylabel=f"{metric} p{percent}, ms", yscale="log")
        axis.legend(fontsize=7)
    _save(figure, path)


def plot_interference(results: Sequence[Interference], path: Path) -> None:
    figure, (axis,) = _axes(1)
    for each in results:
        _cdf(axis, each.alone, f"{each.system}, no prompts")
        _cdf(axis, each.beside, f"{each.system}, prompts at {each.rate:.3g}/s")
    _finish(figure, [(axis, "gap between tokens of the streams, ms")], path)


def _axes(count: int) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, count, figsize=(6 * count, 4), squeeze=False)
    return figure, axes[0]


def _cdf(axis: Any, values: np.ndarray[Any, Any], label: str) -> None:
    finite = values[np.isfinite(values)]
    if len(finite):
        axis.plot(finite * 1e3, np.arange(1, len(finite) + 1) / len(values), drawstyle="steps-post", label=label)


def _finish(figure: Any, axes: Sequence[tuple[Any, str]], path: Path) -> None:
    for axis, what in axes:
        axis.set(xlabel=what, ylabel="part of all", xscale="symlog", ylim=(0, 1.02))
        axis.legend(fontsize=7)
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    from matplotlib import pyplot

    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
