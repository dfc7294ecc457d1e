"""Serving under load: what clients see of a running cluster, or of one that is launched for it.

    python -m bench.serve open --router 127.0.0.1:50051 --rate 4 --input 100-1024 --output 100-1024
    python -m bench.serve open --launch --trace arrivals.jsonl
    python -m bench.serve goodput --launch --model Llama-3-8B --slo ttft:p90:400ms --slo gap:p99:12ms --compare colocated
    python -m bench.serve offline --launch --model Qwen3-0.6B --requests 256 --input 100-1024 --output 100-1024 --temperature 0.6
    python -m bench.serve interference --launch --model Llama-3-8B --streams 64 --prompt 4096 --share 0.8

open          requests arrive by a Poisson process or a trace, whether earlier ones are answered or not
goodput       the highest rate of such requests at which all objectives hold
offline       all requests at once: output tokens per second
interference  the gaps of running streams, without prompts that arrive and with them

Prompts are random token ids, answers are as long as asked (ignore_eos). Progress goes to stderr, one table to stdout, everything
to JSON and PNG below --out.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from bench.serving import options
from bench.serving.bench import Bench, Measured, Sampling, say
from bench.serving.figures import Slo
from bench.serving.goodput import rate_grid
from bench.serving.interference import Interference, Streams, run_interference
from bench.serving.modes import Goodput, Load, find_goodput, run_offline, run_rates, sweep
from bench.serving.plots import can_plot, plot_interference, plot_loads, plot_rates
from bench.serving.shots import Window, read_trace
from bench.serving.table import goodput_table, interference_table, limits, load_table


class Results:
    """What all systems came to."""

    def __init__(self) -> None:
        self.measured: list[Measured] = []
        self.goodput: list[tuple[str, Goodput]] = []
        self.interference: list[Interference] = []

    def __bool__(self) -> bool:
        return bool(self.measured or self.interference)

    def tables(self) -> str:
        parts = [load_table(self.measured)] if self.measured else []
        parts += [goodput_table(self.goodput)] if self.goodput else []
        parts += [interference_table(self.interference)] if self.interference else []
        loads = [*self.measured, *(each.prompts for each in self.interference)]
        return "\n\n".join(parts) + "".join(f"\n{line}" for line in limits(loads))

    def as_dict(self) -> dict[str, Any]:
        return {
            "loads": [each.as_dict() for each in self.measured],
            "goodput": {name: found.as_dict() for name, found in self.goodput},
            "interference": [each.as_dict() for each in self.interference],
        }

    def plot(self, path: Path, slos: Sequence[Slo]) -> None:
        if self.goodput:
            plot_rates(self.measured, slos, path)
        elif self.interference:
            plot_interference(self.interference, path)
        else:
            plot_loads(self.measured, path)


def measure(bench: Bench, args: argparse.Namespace, results: Results) -> None:
    window = Window(args.warmup, args.seconds, args.tail)
    load = Load(args.input, args.output, window, args.seed)
    match args.mode:
        case "open" if args.trace:
            results.measured.append(bench.measure(args.trace.name, read_trace(args.trace), window=None))
        case "open":
            results.measured += run_rates(bench, load, args.rate or [1.0])
        case "goodput":
            grid = rate_grid(args.lowest, args.highest, ratio=args.ratio)
            found = find_goodput(bench, load, grid=grid, objectives=sweep(args.slo, args.sweep))
            results.measured += found.measured
            results.goodput.append((bench.system, found))
        case "offline":
            warmup = min(args.requests, 8)
            done = run_offline(bench, requests=args.requests, inputs=args.input, outputs=args.output, warmup=warmup)
            results.measured.append(done)
        case _:
            streams = Streams(args.streams, args.input, args.output, args.prompt, args.prompt_output, window)
            results.interference.append(run_interference(bench, streams, rate=args.rate, share=args.share))


def finite(value: Any) -> Any:
    """JSON knows no infinity and no NaN: null."""
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def save(results: Results, args: argparse.Namespace) -> None:
    args.out.mkdir(parents=True, exist_ok=True)
    name = args.out / f"serve-{args.mode}-{datetime.now():%Y%m%d-%H%M%S}"
    told = {key: str(value) for key, value in vars(args).items()}
    text = json.dumps(finite({"options": told, **results.as_dict()}), indent=1, allow_nan=False)
    name.with_suffix(".json").write_text(text + "\n")
    shown = f"{name}.json"
    if can_plot():
        results.plot(name.with_suffix(".png"), [*getattr(args, "slo", []), *getattr(args, "sweep", [])])
        shown += f", {name}.png"
    say(f"written: {shown}")


def main(argv: Sequence[str] | None = None) -> int:
    args = options.parse(__doc__ or "", argv)
    results, code = Results(), 0
    try:
        for system in options.systems(args):
            with system.running(args.out / "logs") as router:
                sampling = Sampling(args.temperature, args.top_p)
                bench = Bench(system.name, router, args.seed, sampling, args.clients, args.drain, args.timeout)
                measure(bench, args, results)
    except (RuntimeError, AssertionError, ValueError, OSError) as error:
        say(f"error: {error}")
        code = 2
    if results:  # Also what was measured before something failed.
        print(results.tables(), flush=True)
        save(results, args)
    return code


if __name__ == "__main__":
    sys.exit(main())
