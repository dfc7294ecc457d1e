"""What a kill costs: requests that fail, how long clients wait, how soon everything runs again.

    python -m bench.faults [--requests 800] [--at-once 16] [--only 2p2d-decode,1p1d-prefill] [--seed 1] [--model FOLDER]

Each scenario starts a cluster of real processes with a small random model in float32, sends requests of 16 to 256 prompt tokens
and 32 to 128 output tokens, so many at once, and kills one process (SIGKILL) when three in eight have been sent. Every answer is
compared with transformers' greedy output. Times are a client's. `went on`: requests under way at the kill that ended well; their
pause is the time from the kill to their next event. The longest pause is of any request at any time. Recovery: until all of them
had gone on and a request sent after the kill had its first token. The scenario `none` kills nothing: it shows what the machine
does by itself.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bench.faults_load import HEAD, Load, Outcome
from tests.helpers.client import Client
from tests.helpers.cluster import Cluster
from tests.helpers.process import ROOT, Process, free_port
from tests.helpers.tiny_model import make_tiny_model

Victim = Literal["none", "prefill", "decode", "router"]
LEAST_REQUESTS = 8
"""Of fewer, three in eight may be none, and nothing would be killed."""
WORKER_ARGS = ("--page-size", "16", "--pool-pages", "1000", "--max-context", "1024", "--log-level", "warning")


@dataclass(frozen=True)
class Scenario:
    """workers: of each role. restarts: what was killed is started again at once at its address. routers: that clients know."""

    name: str
    title: str
    victim: Victim
    workers: int
    restarts: bool = False
    routers: int = 1


SCENARIOS = (
    Scenario("none", "2P2D, nothing", "none", 2),
    Scenario("2p2d-prefill", "2P2D, a prefill worker", "prefill", 2),
    Scenario("2p2d-decode", "2P2D, a decode worker", "decode", 2),
    Scenario("2p2d-router", "2P2D, the router, started again", "router", 2, restarts=True),
    Scenario("2p2d-two-routers", "2P2D, one of two routers", "router", 2, routers=2),
    Scenario("1p1d-prefill", "1P1D, the prefill worker, started again", "prefill", 1, restarts=True),
    Scenario("1p1d-decode", "1P1D, the decode worker, started again", "decode", 1, restarts=True),
)


class Stand:
    """async with Stand(scenario, model, folder): the scenario's processes, each started from nothing."""

    def __init__(self, scenario: Scenario, model: Path, folder: Path) -> None:
        self._scenario, self._folder, self._model = scenario, folder, model
        self._second = f"127.0.0.1:{free_port()}" if scenario.routers == 2 else ""
        self._listen = f"127.0.0.1:{free_port()}"
        others = ("--router", self._second) if self._second else ()
        workers = (*WORKER_ARGS, *others)
        self.cluster = Cluster(folder, model, worker_args=workers)
        self.clients: list[Client] = []
        self.killed = 0.0
        self._second_router: Process | None = None

    async def __aenter__(self) -> Stand:
        args = ["--listen", self._second, "--model", str(self._model)]
        if self._second:
            self._second_router = Process("router", args, log=self._folder / "second-router.log")
        await asyncio.to_thread(self._start)
        self.clients = [Client(address) for address in (self.cluster.address, self._second) if address]
        return self

    def _start(self) -> None:
        """The victim among the workers listens where its successor will."""
        self.cluster.start_router()
        for role in ("prefill", "decode"):
            for number in range(self._scenario.workers):
                listen = self._listen if (role, number) == (self._scenario.victim, 0) else ""
                self.cluster.start_worker(role, listen=listen)
        for worker in (*self.cluster.prefill, *self.cluster.decode):
            worker.wait_for_line("worker ready on")
        for router in filter(None, (self.cluster.router, self._second_router)):
            router.wait_for_line("router ready on")

    async def __aexit__(self, *_: object) -> None:
        for client in self.clients:
            await client.channel.close(None)
        self.cluster.close()
        if self._second_router is not None:
            self._second_router.kill()

    def kill(self) -> None:
        self.killed = time.monotonic()
        victim = self._scenario.victim
        if victim == "none":
            return
        if victim == "router":
            self.cluster.router.kill()
        else:
            self.cluster.processes_of(victim).pop(0).kill()
        if self._scenario.restarts and victim == "router":
            self.cluster.start_router()
        elif self._scenario.restarts:
            self.cluster.start_worker(victim, listen=self._listen)


async def measure(scenario: Scenario, model: Path, folder: Path, *, load: Load, seed: int) -> Outcome:
    async with AsyncExitStack() as stack:
        stand = await stack.enter_async_context(Stand(scenario, model, folder))
        warm_up = Load(load.at_once, load.at_once)
        await warm_up.run(stand.clients, random.Random(seed + 1), at=0, then=nothing)
        timelines = await load.run(stand.clients, random.Random(seed), at=load.requests * 3 // 8, then=stand.kill)
        return Outcome.of(scenario.title, timelines, killed=stand.killed, model=model)


def nothing() -> None:
    pass


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.faults", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [scenario.name for scenario in SCENARIOS]
    parser.add_argument("--requests", type=int, default=800, help="of a scenario (default: 800)")
    parser.add_argument("--at-once", type=int, default=16, help="requests under way (default: 16)")
    parser.add_argument("--only", default=",".join(names), help=f"scenarios, with commas between, of {', '.join(names)}")
    parser.add_argument("--seed", type=int, default=1, help="of the requests (default: 1)")
    parser.add_argument("--model", type=Path, help="a folder; default: a random one of two layers")
    args = parser.parse_args(argv)
    for name, least in (("requests", LEAST_REQUESTS), ("at_once", 1)):
        if getattr(args, name) < least:
            parser.error(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(args, name)}")
    if unknown := set(args.only.split(",")) - set(names):
        parser.error(f"--only: no such scenario: {', '.join(sorted(unknown))}")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    os.environ["PYTHONPATH"] = str(
        ROOT
    )  # Workers begin from nothing, as a supervisor would start them (tests/helpers/cluster.py).
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as name:
        model: Path = args.model or make_tiny_model(Path(name) / "model")
        for scenario in SCENARIOS:
            if scenario.name not in args.only.split(","):
                continue
            folder = Path(name) / scenario.name
            folder.mkdir()
            measured = measure(scenario, model, folder, load=Load(args.requests, args.at_once), seed=args.seed)
            outcomes.append(asyncio.run(measured))
            print(f"{scenario.name}: {outcomes[-1].row()}", *outcomes[-1].failed[:3], sep="\n  ", file=sys.stderr, flush=True)
    print("\n".join([HEAD, *(outcome.row() for outcome in outcomes)]))
    return 1 if any(outcome.wrong for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
