"""A benchmark's rows, printed as a table and kept as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

Row = Mapping[str, object]


def show(title: str, rows: Sequence[Row]) -> None:
    """Columns are the first row's keys; floats get three digits that matter."""
    print(f"\n{title}", flush=True)
    if not rows:
        print("  (no rows)")
        return
    cells = [list(rows[0])] + [[_cell(row.get(name, "")) for name in rows[0]] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    for line in cells:
        print("  " + "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)), flush=True)


def save(path: Path, results: Mapping[str, Sequence[Row]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1, default=str))


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) < 100 else f"{value:.1f}"
    return str(value)
