"""The lines of the GPU benchmark, and in which order they run: those of bare engines, then those of clusters."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from bench.gpu import ceilings, cluster
from bench.gpu.decode import BATCH_SIZES, decode_rows
from bench.gpu.engine import Engine, load
from bench.gpu.handoff import bulk_rows, exposed_rows, storing_rows
from bench.gpu.prefill import prefill_rows
from bench.gpu.table import Row, save, show
from bench.gpu.whole import bare_seconds, whole_rows
from common.core import reset_global_ctx

ENGINE_LINES = (1, 2, 3)
POOL_PAGES = 256 * 25 + 64
LONG_CONTEXT = 33024
NEEDS_TWO = "skipped: it needs two GPUs"


def run(chosen: Sequence[int], *, models: Sequence[str], out: Path) -> int:
    """Prints and saves the tables; the exit code."""
    results: dict[str, list[Row]] = {}
    if any(line in (*ENGINE_LINES, 4) for line in chosen):
        _engines(chosen, models, out, results)
        save(out / "engine.json", results)
    codes = [_run_cluster(line, out) for line in chosen if line in cluster.LINES]
    return max(codes, default=0)


def _engines(chosen: Sequence[int], models: Sequence[str], out: Path, results: dict[str, list[Row]]) -> None:
    torch.cuda.set_stream(torch.cuda.Stream())
    measured = ceilings.measure()
    print(f"{torch.cuda.get_device_name()}: {measured}", flush=True)
    bare: dict[str, dict[int, float]] = {}
    lines: dict[int, Callable[[Engine], list[Row]]] = {
        1: lambda engine: [*decode_rows(engine, measured)],
        3: lambda engine: [*prefill_rows(engine, measured)],
    }
    wanted = [line for line in chosen if line in lines]
    if wanted or 2 in chosen:
        for name in models:
            engine = _load(name, max_context=8192, pool_pages=POOL_PAGES)
            for line in wanted:
                results[f"{line} {name}"] = rows = lines[line](engine)
                show(f"{line}. {name}", rows)
            if 2 in chosen:
                bare[name] = bare_seconds(engine)
            del engine
            _forget()
    for name, seconds in bare.items():
        results[f"2 {name}"] = rows = [*whole_rows(name, seconds, out)]
        show(f"2. {name}", rows)
    if 4 in chosen:
        _handoff(out, results)


def _handoff(out: Path, results: dict[str, list[Row]]) -> None:
    if torch.cuda.device_count() < 2:
        print(f"\n4. handoff: {NEEDS_TWO}")
        return
    engine = _load("Llama-3-8B", max_context=LONG_CONTEXT, pool_pages=1100)
    for name, rows in (("storing", storing_rows(engine)), ("bulk", bulk_rows(engine))):
        results[f"4 {name}"] = [*rows]
        show(f"4. {name}", rows)
    del engine
    _forget()
    results["4 exposed"] = [*exposed_rows("Llama-3-8B", out)]
    show("4. exposed", results["4 exposed"])


def _run_cluster(number: int, out: Path) -> int:
    line = cluster.LINES[number]
    if line.two and torch.cuda.device_count() < 2:
        print(f"\n{line.title}\n{NEEDS_TWO}")
        return 0
    return line.run(out)


def _load(name: str, *, max_context: int, pool_pages: int) -> Engine:
    start = time.perf_counter()
    engine = load(name, graph_sizes=BATCH_SIZES, max_context=max_context, pool_pages=pool_pages, chunk_tokens=8192)
    print(f"{name} ready in {time.perf_counter() - start:.1f} s", flush=True)
    return engine


def _forget() -> None:
    reset_global_ctx()
    torch.cuda.empty_cache()
