"""Simulated workers for a router that runs, in few processes, with faults on demand.

    python -m bench.fleet --model DIR --router 127.0.0.1:50051 --prefill 64 --decode 64 --processes 2
    python -m bench.fleet ... --faults 0.5 --seed 7           # a random fault every 2 seconds on average, the same each time

Reads orders from stdin: kill NAME | stop NAME | pause NAME SECONDS | slow NAME FACTOR SECONDS | fail NAME SHARE SECONDS | stat
(NAME is prefill-0, ..., decode-0, ...). Ends when stdin ends or at Ctrl-C. What follows -- goes to every worker.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import sys
from pathlib import Path

import uvloop

from bench.fleet.faults import Faults
from bench.fleet.fleet import Fleet, Plan
from bench.fleet.orders import Order


def parse() -> tuple[Plan, argparse.Namespace]:
    parser = argparse.ArgumentParser(
        prog="python -m bench.fleet",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--model", type=Path, required=True, help="folder of the model: its config and tokenizer")
    parser.add_argument("--router", required=True, help="address of the router")
    parser.add_argument("--prefill", type=int, default=1, help="prefill workers (default: 1)")
    parser.add_argument("--decode", type=int, default=1, help="decode workers (default: 1)")
    parser.add_argument("--processes", type=int, default=1, help="processes that they share (default: 1)")
    parser.add_argument("--time-scale", type=float, default=1.0, help="simulated seconds per second (default: 1)")
    parser.add_argument("--revive", type=float, default=1.0, help="seconds until a killed worker's successor starts (default: 1)")
    parser.add_argument("--faults", type=float, default=0.0, help="random faults per second (default: 0)")
    parser.add_argument("--seed", type=int, default=0, help="of the random faults (default: 0)")
    parser.add_argument("--log", type=Path, default=Path("bench/out/fleet.log"), help="where the workers' lines go")
    parser.add_argument("worker_args", nargs="*", help="for every worker, after --")
    args = parser.parse_args()
    for name in ("prefill", "decode", "processes"):
        if getattr(args, name) < (1 if name == "processes" else 0):
            parser.error(f"--{name} must be at least {1 if name == 'processes' else 0}, got {getattr(args, name)}")
    if args.prefill + args.decode < 1:
        parser.error("--prefill and --decode must be at least 1 together, got 0")
    if args.faults < 0:
        parser.error(f"--faults must be at least 0, got {args.faults:g}")
    return Plan(
        model=args.model,
        router=args.router,
        prefill=args.prefill,
        decode=args.decode,
        processes=args.processes,
        time_scale=args.time_scale,
        revive=args.revive,
        seed=args.seed,
        arguments=args.worker_args,
        log_level="info",
    ), args


async def run() -> None:
    plan, args = parse()
    args.log.parent.mkdir(parents=True, exist_ok=True)
    async with Fleet(plan, log=args.log) as fleet:
        print(f"fleet ready: {plan.prefill} prefill, {plan.decode} decode, processes {fleet.pids}, log {args.log}", flush=True)
        hurting = asyncio.create_task(_hurt(fleet, args.faults, args.seed))
        taking = asyncio.create_task(take_orders(fleet))
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, taking.cancel)
        await asyncio.wait((taking,))
        hurting.cancel()


async def take_orders(fleet: Fleet) -> None:
    """From stdin, until it ends."""
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while line := (await lines.readline()).decode():
        try:
            order = Order.parse(line.rstrip("\n"))
            if order.what == "stat":
                print(*await fleet.stats(), sep="\n", flush=True)
            else:
                await fleet.order(str(order))
        except ValueError as error:
            print(f"error: {error}", flush=True)


async def _hurt(fleet: Fleet, rate: float, seed: int) -> None:
    faults, rng = Faults(fleet.plan.names, seed=seed), random.Random(seed)
    while rate:
        await asyncio.sleep(rng.expovariate(rate))
        order = faults.next()
        print(f"fault: {order}", flush=True)
        await fleet.order(str(order))


if __name__ == "__main__":
    uvloop.run(run())
