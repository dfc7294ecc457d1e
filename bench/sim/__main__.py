"""Placement policies on a simulated fleet under the same open-loop traffic.

    python -m bench.sim [--policies least_load,prefix] [--traces steady,chats] [--prefill 64] [--decode 64] [--rate 900]

All times are simulated: the fleet is many H200s, this machine is not, so by default twenty seconds pass here in one simulated
(--time-scale 0.05). Each pair of policy and trace has a router and a fleet of its own with empty caches; the first third warms
them and is not measured. Prints a table, writes bench/out/sim.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any, get_args

import grpc
import uvloop

from bench.fleet.fleet import Fleet, Plan
from bench.fleet.model import make_model
from bench.serving.figures import Figures, Slo, ms
from bench.serving.shots import Window
from bench.sim.shooter import Seen, Shooter
from bench.sim.traffic import TRACES, TraceName, Traffic
from common.rpc.gen.pdserve.v1 import generation_pb2 as pb
from common.rpc.gen.pdserve.v1.generation_pb2_grpc import GenerationServiceStub
from router.fleet.policies import PolicyName
from tests.helpers.eventually import eventually
from tests.helpers.process import Process, free_port

POLICIES: tuple[str, ...] = get_args(PolicyName)
LEASE_SECONDS, TRANSFER_SECONDS = 10.0, 20.0
"""Simulated: where a chunk of 8192 tokens takes seconds, a lease of ten would run out in it."""
COLUMNS = (
    *("trace", "policy", "requests", "failed", "ttft p50", "p99 ms", "gap p99"),
    *("cached", "good", "goodput/s", "tokens/s", "lag s"),
)


async def measure(args: argparse.Namespace, policy: str, trace: TraceName, folder: Path) -> dict[str, Any]:
    """One policy under one trace."""
    address = f"127.0.0.1:{free_port()}"
    model = make_model(folder / "model")
    flags = ["--model", str(model), "--listen", address, "--policy", policy, "--max-queue", "20000", "--max-in-flight", "20000"]
    flags += args.router_args
    router = Process("router", [*flags, "--log-level", "info"], log=folder / f"router-{policy}-{trace}.log")
    plan = Plan(
        model=model,
        router=address,
        prefill=args.prefill,
        decode=args.decode,
        processes=args.processes,
        time_scale=args.time_scale,
        seed=args.seed,
        arguments=() if args.sim_profile is None else ("--sim-profile", str(args.sim_profile)),
        prefill_args=("--transfer-timeout", f"{TRANSFER_SECONDS / args.time_scale:g}s"),
        decode_args=("--lease", f"{LEASE_SECONDS / args.time_scale:g}s", *args.decode_args),
    )
    questions = Traffic(trace, rate=args.rate, seconds=args.seconds, seed=args.seed).questions()
    try:
        await asyncio.to_thread(router.wait_for_line, "listening on")
        async with Fleet(plan, log=folder / "fleet.log") as fleet, grpc.aio.insecure_channel(address) as channel:
            await eventually(partial(_are_all_there, channel, args.prefill + args.decode), within=60)
            window = Window(warmup=args.seconds / 3, seconds=args.seconds * 2 / 3)
            seen = await Shooter(channel, time_scale=args.time_scale, warmup=window.warmup).shoot(questions)
            lag = max(stat["lag_seconds"] for stat in await fleet.stats())
        return summary(seen, window, args.slo) | {"policy": policy, "trace": trace, "lag_seconds": lag}
    finally:
        router.kill()


async def _are_all_there(channel: grpc.aio.Channel, count: int) -> bool:
    stub: Any = GenerationServiceStub(channel)
    workers = (await stub.GetCluster(pb.GetClusterRequest(), timeout=10)).workers
    return len([worker for worker in workers if worker.state == "ready"]) == count


def summary(seen: list[Seen], window: Window, slos: list[Slo]) -> dict[str, Any]:
    figures = Figures.of([each.record for each in seen], window)
    measured = [each for each in seen if each.record.kind == "measured"]
    prompt_tokens = sum(each.record.input_tokens for each in measured)
    good = sum(is_good(each, slos) for each in measured)
    return figures.as_dict() | {
        "cached_share": sum(each.cached_tokens for each in measured) / max(1, prompt_tokens),
        "good_requests_per_s": good / window.seconds,
        "good_share": good / max(1, len(measured)),
        "lateness_ms": ms(max((each.record.sent - each.record.at for each in measured), default=0.0)),
    }


def is_good(seen: Seen, slos: list[Slo]) -> bool:
    """Every objective holds for this request alone; of gaps its mean counts."""
    record = seen.record
    values = {"ttft": record.ttft, "gap": record.mean_gap or 0.0, "tpot": record.mean_gap or 0.0, "e2e": record.end_to_end}
    return not record.error and all(values[slo.metric] <= slo.limit for slo in slos)


def row(result: dict[str, Any]) -> tuple[str, ...]:
    times = result["ms"]

    def shown(value: float | None) -> str:
        return "-" if value is None else f"{value:.0f}" if value >= 100 else f"{value:.1f}"

    return (
        *(result["trace"], result["policy"], str(result["requests"]), str(sum(result["failed"].values()))),
        *(shown(times["ttft"]["p50"]), shown(times["ttft"]["p99"]), shown(times["gap"]["p99"])),
        *(f"{result['cached_share']:.0%}", f"{result['good_share']:.0%}", f"{result['good_requests_per_s']:.0f}"),
        *(f"{result['output_tokens_per_s']:.0f}", f"{result['lag_seconds']:.2f}"),
    )


def show(rows: list[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for cells in rows:
        left = [cell.ljust(width) for cell, width in zip(cells[:2], widths[:2], strict=True)]
        print("  ".join([*left, *(cell.rjust(width) for cell, width in zip(cells[2:], widths[2:], strict=True))]), flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.sim", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--policies", default=",".join(POLICIES), help=f"of {', '.join(POLICIES)} (default: all)")
    parser.add_argument("--traces", default=",".join(TRACES), help=f"of {', '.join(TRACES)} (default: all)")
    parser.add_argument("--prefill", type=int, default=64)
    parser.add_argument("--decode", type=int, default=64)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rate", type=float, default=900.0, help="requests per simulated second (default: 900)")
    parser.add_argument("--seconds", type=float, default=2.0, help="simulated, the first third unmeasured (default: 2)")
    parser.add_argument("--time-scale", type=float, default=0.05, help="simulated seconds per second (default: 0.05)")
    parser.add_argument("--sim-profile", type=Path, default=None, help="see docs/simulator.md (default: one H200, Llama-3-8B)")
    parser.add_argument("--router-args", type=shlex.split, default=[], metavar="'ARGS'", help="more options of the router")
    parser.add_argument("--decode-args", type=shlex.split, default=[], metavar="'ARGS'", help="and of the decode workers")
    parser.add_argument(
        "--slo", type=Slo.parse, action="append", help="what a good request keeps (default: ttft 400 ms, mean gap 12 ms)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("bench/out"))
    args = parser.parse_args()
    args.slo = args.slo or [Slo.parse("ttft:max:400ms"), Slo.parse("gap:max:12ms")]
    for name, known in (("policies", POLICIES), ("traces", TRACES)):
        given = getattr(args, name).split(",")
        if unknown := sorted(set(given) - set(known)):
            parser.error(f"--{name} must be of {', '.join(known)}, got {', '.join(unknown)}")
        setattr(args, name, given)
    for name in ("rate", "seconds", "time_scale", "prefill", "decode", "processes"):
        if not getattr(args, name) > 0:
            parser.error(f"--{name.replace('_', '-')} must be more than 0, got {getattr(args, name)}")
    return args


def main() -> int:
    args = parse()
    args.out.mkdir(parents=True, exist_ok=True)
    results = []
    with tempfile.TemporaryDirectory(prefix="bench-sim-") as folder:
        for trace in args.traces:
            for policy in args.policies:
                results.append(uvloop.run(measure(args, policy, trace, Path(folder))))
                print(f"{trace}, {policy}: done", file=sys.stderr, flush=True)
    show([COLUMNS, *map(row, results)])
    setting = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items() if key != "slo"}
    (args.out / "sim.json").write_text(
        json.dumps({"setting": setting | {"slo": list(map(str, args.slo))}, "results": results}) + "\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
