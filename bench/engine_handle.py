"""What crossing to the engine costs, in a thread of the worker and in a process of its own.

    python -m bench.engine_handle [--seconds 3] [--step-ms 1.5] [--tokens 64] [--rounds 3]

The engine makes steps of pure Python of a fixed amount of work, as a scheduler around a graph's replay does, and emits one
StepTokens per step; the event loop turns each into protobuf, as a decode worker does. Best of --rounds by p99.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import uvloop

from bench.busy_core import BusyCore, Run, Step, spin
from common.engine.engines import make_engine
from common.wire import token_to_pb
from common.worker_config import ENGINES

PINGS = 2000


def rounds_for(seconds: float) -> int:
    """How many rounds of spin() take so long, undisturbed."""
    begun = time.perf_counter()
    spin(1_000_000)
    return int(1_000_000 * seconds / (time.perf_counter() - begun))


async def measure(kind: str, args: argparse.Namespace, rounds: int) -> dict[str, list[float]]:
    """Seconds: idle: call round trips; late: event latencies; step: step times; busy: round trips while it steps."""
    found: dict[str, list[float]] = {"idle": [], "late": [], "step": [], "busy": []}

    def on_event(event: Step) -> None:
        found["late"].append(time.monotonic() - event.emitted_at)
        found["step"].append(event.took)
        for token in event.tokens.tokens:
            token_to_pb(token).SerializeToString()

    engine = make_engine(kind, partial(BusyCore, rounds, args.tokens), on_event=on_event)
    await engine.start()
    for _ in range(PINGS):
        found["idle"].append(await timed(engine.call, "ping"))
    end = time.monotonic() + args.seconds
    await engine.call(Run(args.seconds))
    while time.monotonic() < end - 0.1:
        found["busy"].append(await timed(engine.call, "ping"))
        await asyncio.sleep(0.02)
    await asyncio.sleep(0.3)
    await engine.close()
    return found


async def timed(call: Callable[[Any], Any], command: Any) -> float:
    begun = time.monotonic()
    await call(command)
    return time.monotonic() - begun


def percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def show(kind: str, found: dict[str, list[float]], alone: float) -> str:
    cells = [kind]
    for name in ("idle", "late", "busy"):
        cells.append(" / ".join(f"{percentile(found[name], share) * 1e6:.0f}" for share in (0.5, 0.99)))
    slower = (statistics.mean(found["step"]) / alone, percentile(found["step"], 0.99) / alone)
    return "| " + " | ".join([*cells, " / ".join(f"{ratio:.2f}" for ratio in slower), str(len(found["step"]))]) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--step-ms", type=float, default=1.5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    rounds = min(rounds_for(args.step_ms / 1000) for _ in range(5))
    print(f"steps of {args.step_ms:g} ms, {args.tokens} tokens each; microseconds, p50 / p99")
    print("| engine | idle round trip | event latency | round trip while stepping | step time, mean / p99, x alone | steps |")
    print("|---|---|---|---|---|---|")
    for kind in ENGINES:
        runs = [uvloop.run(measure(kind, args, rounds)) for _ in range(args.rounds)]
        print(show(kind, min(runs, key=lambda found: percentile(found["late"], 0.99)), args.step_ms / 1000))


if __name__ == "__main__":
    main()
