"""One table on stdout."""

from __future__ import annotations

import math
from collections.abc import Sequence

from bench.serving.bench import Measured
from bench.serving.figures import Figures, percentile
from bench.serving.interference import Interference
from bench.serving.modes import Goodput

Row = Sequence[str]


def render(header: Row, rows: Sequence[Row]) -> str:
    """Columns as wide as needed; the first two to the left, figures to the right."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]

    def line(row: Row) -> str:
        cells = (
            f"{cell:<{width}}" if column < 2 else f"{cell:>{width}}"
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        return "  ".join(cells).rstrip()

    return "\n".join(map(line, (header, *rows)))


def load_table(measured: Sequence[Measured]) -> str:
    header = [
        "system",
        "load",
        "requests",
        "failed",
        "out tok/s",
        *(f"{name} p50/p90/p99/max ms" for name in ("ttft", "gap", "e2e")),
    ]
    rows = [
        [
            each.system,
            each.label,
            str(each.figures.requests),
            str(each.figures.failures),
            f"{each.figures.output_rate:,.0f}",
            *(spread(each.figures, name) for name in ("ttft", "gap", "e2e")),
        ]
        for each in measured
    ]
    return render(header, rows)


def goodput_table(found: Sequence[tuple[str, Goodput]]) -> str:
    """A row per objectives; a column per system, and how the first one compares with each other."""
    names = [name for name, _ in found]
    others = [f"{names[0]} / {name}" for name in names[1:]]
    rows = []
    for number, (slos, first) in enumerate(found[0][1].best):
        rates = [goodput.best[number][1] for _, goodput in found]
        ratios = [f"{first / rate:.2f}x" if first and rate else "-" for rate in rates[1:]]
        rows.append(
            [" ".join(map(str, slos)), "requests/s", *("none" if rate is None else f"{rate:g}" for rate in rates), *ratios]
        )
    return render(["objectives", "goodput", *names, *others], rows)


def interference_table(results: Sequence[Interference]) -> str:
    header = ["system", "prompts", "of capacity", "streams", *(f"gap p{p:g} alone/beside ms" for p in (50, 99)), "p99 ratio"]
    rows = [
        [
            each.system,
            f"{each.rate:.3g}/s",
            "-" if each.capacity is None else f"{each.capacity:.3g}/s",
            f"{each.running[0]}/{each.running[1]}",
            *(f"{number(percentile(each.alone, p))} / {number(percentile(each.beside, p))}" for p in (50, 99)),
            f"{each.ratio(99):.3f}x",
        ]
        for each in results
    ]
    return render(header, rows)


def limits(measured: Sequence[Measured]) -> list[str]:
    """A line for each load whose client did not keep up."""
    return [f"note: {each.system}, {each.label}: {each.health.limit}" for each in measured if each.health.limit]


def spread(figures: Figures, metric: str) -> str:
    return " / ".join(number(figures.at(metric, percent)) for percent in (50, 90, 99, 100))


def number(seconds: float) -> str:
    """In ms, three digits. What failed has no time."""
    if math.isnan(seconds):
        return "-"
    return f"{seconds * 1e3:.3g}" if seconds < 1 else "failed" if math.isinf(seconds) else f"{seconds * 1e3:.0f}"
