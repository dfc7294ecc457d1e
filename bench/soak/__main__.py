"""Thousands of requests through a simulated fleet while workers are killed, paused, slowed and fail to transfer.

    python -m bench.soak [--requests 20000] [--faults 0.01] [--prefill 8] [--decode 8] [--time-scale 20] [--seed 0]

Passes (exit code 0) if no answer was wrong and none failed, every page of every worker is free again at the end, and no process
grew by 5 % or more over the second half. Writes bench/out/soak.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path

import uvloop
from tokenizers import Tokenizer

from bench.fleet.faults import Faults
from bench.fleet.fleet import Fleet, Plan
from bench.fleet.model import make_model
from bench.soak.memory import Memory
from bench.soak.soak import Soak, Verdict
from bench.soak.wishes import Taste, wishes
from common.engine.sim.tokens import SimVocabulary
from common.model_dir import ModelDir
from tests.helpers.client import Client
from tests.helpers.process import Process, free_port

MOST_GROWTH = 0.05


async def soak(args: argparse.Namespace, folder: Path) -> tuple[Verdict, Memory]:
    model = args.model or make_model(folder / "model")
    opened = ModelDir.open(model, need_weights=False)
    address = f"127.0.0.1:{free_port()}"
    router = Process("router", ["--model", str(model), "--listen", address, "--log-level", "info"], log=folder / "router.log")
    plan = Plan(
        model=model,
        router=address,
        prefill=args.prefill,
        decode=args.decode,
        processes=args.processes,
        time_scale=args.time_scale,
        revive=0.5,
        seed=args.seed,
        arguments=("--page-size", "16", "--pool-pages", "2000"),
        decode_args=("--lease", "3s"),
    )
    try:
        await asyncio.to_thread(router.wait_for_line, "listening on")
        async with Fleet(plan, log=folder / "fleet.log") as fleet, Client(address) as client:
            await asyncio.to_thread(router.wait_for_line, "router ready on")
            pids = {"router": router.pid} | {f"workers-{number}": pid for number, pid in enumerate(fleet.pids)}
            async with Memory(pids) as memory:
                running = Soak(
                    client,
                    fleet,
                    vocabulary=SimVocabulary(opened.vocab_size, frozenset(opened.eos_token_ids)),
                    words=Tokenizer.from_file(str(opened.tokenizer_file)),
                    faults=Faults(plan.names, seed=args.seed, seconds=args.fault_seconds),
                    concurrency=args.concurrency,
                )
                taste = Taste(faults=args.faults, ids=min(256, opened.vocab_size))
                telling = asyncio.create_task(_tell(running, args.requests))
                verdict = await running.run(wishes(args.requests, taste, seed=args.seed))
                telling.cancel()
            return verdict, memory
    finally:
        router.kill()


async def _tell(running: Soak, requests: int) -> None:
    while True:
        await asyncio.sleep(10)
        verdict = running.verdict
        print(f"{verdict.asked} of {requests} asked, {len(verdict.wrong)} wrong, {verdict.failed.total()} failed", flush=True)


def judge(verdict: Verdict, growths: dict[str, float]) -> list[str]:
    """What speaks against it."""
    reasons = [f"wrong: {why}" for why in verdict.wrong[:5]]
    reasons += [f"{count} failed: {why}" for why, count in verdict.failed.most_common(5)]
    reasons += [f"not at rest: {verdict.leaks}"] if verdict.leaks else []
    reasons += [f"{name} grew by {growth:.1%} in the second half" for name, growth in growths.items() if growth >= MOST_GROWTH]
    return reasons


def report(verdict: Verdict, memory: Memory, growths: dict[str, float]) -> None:
    rate = verdict.asked / verdict.seconds
    print(f"requests    {verdict.asked} in {verdict.seconds:.1f} s, {rate:.0f} a second")
    print(f"right       {verdict.right}; {verdict.cancelled} cancelled")
    print(f"wrong       {len(verdict.wrong)}")
    print(f"failed      {verdict.failed.total()}")
    print(f"tokens      {verdict.tokens}; {verdict.cached_tokens / max(1, verdict.prompt_tokens):.0%} of prompt tokens cached")
    print(f"attempts    {verdict.attempts} answers took more than one")
    print(f"faults      {', '.join(f'{count} {what}' for what, count in sorted(verdict.faults.items())) or 'none'}")
    print(f"pages       {verdict.leaks or 'all free at the end'}")
    for name, samples in memory.samples.items():
        trend = f"{growths[name]:+.1%} over the second half" if growths else "too short a run to say how it grows"
        print(f"{name:<11} {samples[-1] / 2**20:.0f} MiB, {trend}")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--faults", type=float, default=0.01, help="how many requests come with a fault (default: 0.01)")
    parser.add_argument("--fault-seconds", type=float, default=0.5, help="longest pause or the like (default: 0.5)")
    parser.add_argument("--prefill", type=int, default=8)
    parser.add_argument("--decode", type=int, default=8)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--time-scale", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", type=Path, default=None, help="folder with a tokenizer; default: a small one is made")
    parser.add_argument("--out", type=Path, default=Path("bench/out"))
    args = parser.parse_args()
    for name in ("requests", "prefill", "decode", "processes", "concurrency", "time_scale"):
        if not getattr(args, name) > 0:
            parser.error(f"--{name.replace('_', '-')} must be more than 0, got {getattr(args, name)}")
    if not 0 <= args.faults <= 1:
        parser.error(f"--faults must be in [0, 1], got {args.faults:g}")
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        verdict, memory = uvloop.run(soak(args, Path(folder)))
    growths = memory.growths()
    report(verdict, memory, growths)
    against = judge(verdict, growths)
    values = vars(verdict) | {"growth": growths, "rss": memory.samples, "against": against, "seed": args.seed}
    (args.out / "soak.json").write_text(json.dumps(values) + "\n")
    for reason in against:
        print(f"FAIL        {reason}")
    return 1 if against else 0


if __name__ == "__main__":
    sys.exit(main())
