"""Line 2: the whole decode worker, streaming to a router and clients over gRPC, beside the bare replay of the same step.

Streams begin together with short prompts. A step's time is the time between two of a stream's tokens, SPAN apart and around the
length that the bare step has, so that both attend to as much; the median over the streams.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path

from bench.gpu.decode import CONTEXT, GREEDY, step_seconds
from bench.gpu.engine import Engine
from bench.serving.bench import Bench, Sampling
from bench.serving.clients import default_clients
from bench.serving.records import Record
from bench.serving.shots import Shot
from bench.serving.systems import Deployment, local_model

STREAMS = (1, 8, 64, 256)
GOALS = {8: 1.10, 64: 1.05, 256: 1.05}
PROMPT = 64
SPAN = 160
FIRST = CONTEXT - PROMPT - SPAN // 2
"""Index of the output token that the span begins with."""


def bare_seconds(engine: Engine) -> dict[int, float]:
    """By number of streams: one replay of the captured step."""
    return {count: step_seconds(engine, count, GREEDY) for count in STREAMS}


def whole_rows(model: str, bare: Mapping[int, float], out: Path) -> list[dict[str, object]]:
    """Of one GPU with both roles."""
    path, options = local_model(model, out / "models")
    system = Deployment(model=path, device="cuda", prefill=0, decode=1, options=(*options,)).colocated()
    rows: list[dict[str, object]] = []
    with system.running(out / "logs") as router:
        for count in STREAMS:
            bench = Bench(system.name, router, count, Sampling(), default_clients(), drain=120.0, timeout=120.0)
            outcome = bench.shoot([Shot(0.0, PROMPT, FIRST + SPAN + 1)] * count)
            if failed := [record.error for record in outcome.records if record.error]:
                raise RuntimeError(f"{len(failed)} of {count} streams failed: {failed[0]}")
            seconds = statistics.median(map(_step_seconds, outcome.records))
            rows.append(
                {
                    "model": model,
                    "streams": count,
                    "bare ms": bare[count] * 1e3,
                    "worker ms": seconds * 1e3,
                    "x bare": seconds / bare[count],
                    "goal": GOALS.get(count, ""),
                    "note": outcome.health.limit,
                }
            )
    return rows


def _step_seconds(record: Record) -> float:
    times = [time for time, count in zip(record.times, record.counts, strict=True) for _ in range(count)]
    return (times[FIRST + SPAN] - times[FIRST]) / SPAN
