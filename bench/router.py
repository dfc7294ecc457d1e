"""The router's own speed: fake workers in one process, the router, and this one client, on the same cores.

    python -m bench.router [--streams 128] [--tokens 600] [--rate 5000] [--model FOLDER] [--no-matrix]

Prints tokens/s delivered while decode emits as fast as flow control takes it, as text and as ids_only; the age of tokens on
arrival at a fixed rate, through the router and, as the baseline, with the same client reading the same streams straight from
the worker's process (bench/router_direct.py); and what a token costs the router.
Then what of an offered rate is delivered at 1 to 1024 streams over 1 to 64 workers of each role, and what a request of one token
costs.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import uvloop

from bench.steps import IDS, age
from common.fingerprint import fingerprint
from common.model_dir import ModelDir
from common.rpc.gen.pdserve.v1 import generation_pb2
from tests.helpers.client import Client, request
from tests.helpers.process import START_SECONDS, Process, free_port

WARM_SECONDS = 1.0
FINE_TICK, COARSE_TICK = 0.001, 0.02
"""Seconds: how closely ages are told, up to a quarter of a second and up to five."""
MATRIX_STREAMS = (1, 16, 128, 1024)
MATRIX_WORKERS = (1, 8, 64)
MATRIX_RATE, MATRIX_SECONDS = 30_000, 6.0
"""Tokens per second of all streams together, and for how long."""
SHORTEST_GAP = 0.001
"""Seconds between a worker's steps in the matrix: no model's are closer."""
MATRIX_REQUESTS = 128
"""So many at once make their processor time measurable."""


@dataclass
class Measured:
    """One run. steady_rate, ages: tokens per second, and each token's seconds from its step to the client, while all streams run
    and WARM_SECONDS are over; 0 and none if they never all did, none if some are older than ids can tell."""

    tokens: int = 0
    deltas: int = 0
    first: float = 0.0
    last: float = 0.0
    steady_rate: float = 0.0
    router_cpu: float = 0.0
    router_rss: int = 0
    ages: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return self.tokens / (self.last - self.first)


async def load(address: str, *, streams: int, tokens: int, ids_only: bool, tick: float, pid: int) -> Measured:
    """All streams at once, read to their ends; parsed only then, so that this client's own work is no part of the figures."""
    router = psutil.Process(pid)
    arrivals: list[tuple[float, bytes]] = []
    ask = request([1, 2, 3], sampling={"max_tokens": tokens, "ignore_eos": True}, ids_only=ids_only)
    async with Client(address) as client:
        generate = client.channel.unary_stream(
            "/pdserve.v1.GenerationService/Generate",
            request_serializer=generation_pb2.GenerateRequest.SerializeToString,
            response_deserializer=lambda data: (time.monotonic(), data),
        )

        async def one() -> None:
            async for arrival in generate(ask, timeout=120):
                arrivals.append(arrival)

        before = sum(router.cpu_times()[:2])
        await asyncio.gather(*(one() for _ in range(streams)))
        router_cpu = sum(router.cpu_times()[:2]) - before
    measured = measure(arrivals, tick=tick)
    measured.router_cpu, measured.router_rss = router_cpu, router.memory_info().rss
    return measured


def measure(arrivals: list[tuple[float, bytes]], *, tick: float) -> Measured:
    responses = [(now, generation_pb2.GenerateResponse.FromString(data)) for now, data in sorted(arrivals)]
    deltas = [(now, event.request_id, event.delta.token_ids) for now, event in responses if event.HasField("delta")]
    first, last = deltas[0][0], deltas[-1][0]
    ends = {request_id: now for now, request_id, _ in deltas}
    begins = {request_id: now for now, request_id, _ in reversed(deltas)}
    measured = Measured(sum(len(ids) for _, _, ids in deltas), len(deltas), first, last)
    begin, end = max(first + WARM_SECONDS, *begins.values()), min(ends.values())
    if begin < end:
        steady = [(now, ids) for now, _, ids in deltas if begin < now <= end]
        measured.steady_rate = sum(len(ids) for _, ids in steady) / (end - begin)
        measured.ages = [age(token_id, now, tick=tick) for now, ids in steady for token_id in ids]
        if max(measured.ages) > 0.75 * IDS * tick:  # Who is older would look young.
            measured.ages = []
    return measured


@dataclass
class Stand:
    """router, direct: addresses of the router and of the worker's own GenerationService."""

    router: str
    direct: str
    router_pid: int
    tick: float

    def load(self, address: str, *, streams: int, tokens: int, ids_only: bool = False) -> Measured:
        return uvloop.run(load(address, streams=streams, tokens=tokens, ids_only=ids_only, tick=self.tick, pid=self.router_pid))


@contextmanager
def stand(model: Path, *, gap: float, tick: float = FINE_TICK, workers: int = 1) -> Iterator[Stand]:
    """A router process and a process of so many workers of each role, which make a step every gap (seconds; 0: once the last has
    been taken)."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        address, direct = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
        # Patient: a pretended worker that was taken for dead on busy cores cannot go on where another stopped.
        patience = ["--peer-silence", "60s", "--worker-silence", "60s"]
        router = Process("router", ["--model", str(model), "--listen", address, *patience], log=folder / "router.log")
        arguments = ["--router", address, "--fingerprint", fingerprint(ModelDir.open(model)), "--tick", str(tick)]
        worker = Process(
            "bench.router_worker",
            [*arguments, "--direct", direct, "--gap", str(gap), "--workers", str(workers)],
            log=folder / "worker.log",
        )
        try:
            until = time.monotonic() + START_SECONDS
            while len(set(re.findall("session with .* worker (.*) at .* stands", router.output))) < 2 * workers:
                assert router.is_alive and worker.is_alive and time.monotonic() < until, f"{router.output}{worker.output}"
                time.sleep(0.05)
            yield Stand(address, direct, router.pid, tick)
        finally:
            router.kill()
            worker.kill()


def percentiles(ages: list[float]) -> tuple[float, float]:
    """p50 and p99 in milliseconds."""
    cuts = statistics.quantiles(ages, n=100)
    return cuts[49] * 1e3, cuts[98] * 1e3


def shown(ages: list[float], *, digits: int = 1) -> str:
    return " / ".join(f"{value:.{digits}f}" for value in percentiles(ages)) if len(ages) > 1 else "-"


def row(name: str, measured: Measured, *, age: str = "-", of_router: bool = True) -> str:
    cost = f"{measured.router_cpu / measured.tokens * 1e6:9.1f} {measured.router_rss / 2**20:8.0f}" if of_router else ""
    return f"{name:34} {measured.rate:9,.0f} {measured.tokens / measured.deltas:12.1f} {age:>14} {cost}".rstrip()


def fixed_rate(model: Path, *, streams: int, rate: float, rounds: int) -> None:
    """Direct and through the router by turns, on one pair of processes; the ages of all rounds together."""
    tokens = max(2, int(rate * 6 / streams))
    ages: dict[str, list[float]] = {"direct": [], "router": []}
    with stand(model, gap=streams / rate) as on:
        for _ in range(rounds):
            direct = on.load(on.direct, streams=streams, tokens=tokens)
            routed = on.load(on.router, streams=streams, tokens=tokens)
            ages["direct"] += direct.ages
            ages["router"] += routed.ages
    print(row(f"at {rate:,.0f} tokens/s, no router", direct, age=shown(ages["direct"]), of_router=False))
    print(row(f"at {rate:,.0f} tokens/s, text", routed, age=shown(ages["router"])))
    if all(len(each) > 1 for each in ages.values()):
        (p50, p99), (base50, base99) = percentiles(ages["router"]), percentiles(ages["direct"])
        print(f"{'added by the router (difference of the two percentiles)':57} {p50 - base50:7.1f} / {p99 - base99:4.1f}")


def make_model(folder: Path) -> Path:
    """In a process of its own: it needs torch, whose memory and threads should not take part."""
    script = f"from tests.helpers.tiny_model import make_tiny_model; make_tiny_model({str(folder)!r})"
    subprocess.run([sys.executable, "-c", script], check=True)
    return folder


def main(model: Path, *, streams: int, tokens: int, rate: float, rounds: int) -> None:
    print(f"{streams} streams of {tokens} tokens; worker, router and client on {psutil.cpu_count()} cores")
    print(f"{'':34} {'tokens/s':>9} {'tokens/delta':>12} {'p50 / p99 ms':>14} {'router us':>9} {'RSS MiB':>8}")
    for name, ids_only in (("as fast as possible, text", False), ("as fast as possible, ids_only", True)):
        with stand(model, gap=0) as on:
            print(row(name, on.load(on.router, streams=streams, tokens=tokens, ids_only=ids_only)), flush=True)
    fixed_rate(model, streams=streams, rate=rate, rounds=rounds)


def matrix(model: Path) -> None:
    """One router under few and many streams and workers; text comes first in each cell, then ids. A request's cost is that of one
    that makes a single token."""
    columns = ("offered/s", "delivered/s", "a delta", "p50 / p99 ms", "router us per token", "per request, us")
    print("\n{:34} {:>9} {:>15} {:>10} {:>23} {:>19} {:>16}".format("", *columns))
    for workers in MATRIX_WORKERS:
        for streams in MATRIX_STREAMS:
            gap = max(SHORTEST_GAP, streams / MATRIX_RATE)
            with stand(model, gap=gap, tick=COARSE_TICK, workers=workers) as on:
                text, ids = (
                    on.load(on.router, streams=streams, tokens=int(MATRIX_SECONDS / gap), ids_only=ids_only)
                    for ids_only in (False, True)
                )
                single = on.load(on.router, streams=streams, tokens=1)
            costs = " / ".join(f"{one.router_cpu / one.tokens * 1e6:.1f}" for one in (text, ids))
            rates = " / ".join(f"{one.steady_rate:,.0f}" for one in (text, ids))
            deltas = " / ".join(f"{one.tokens / one.deltas:.1f}" for one in (text, ids))
            ages = ", ".join(shown(one.ages, digits=0) for one in (text, ids))
            name = f"{streams} streams, {workers} + {workers} workers"
            request = f"{single.router_cpu / single.tokens * 1e6:,.0f}" if streams >= MATRIX_REQUESTS else "-"
            print(f"{name:34} {streams / gap:9,.0f} {rates:>15} {deltas:>10} {ages:>23} {costs:>19} {request:>16}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=600, help="per stream, as fast as possible")
    parser.add_argument("--rate", type=float, default=5000.0, help="tokens per second of the fixed run")
    parser.add_argument("--rounds", type=int, default=2, help="of the fixed run, 6 s direct and 6 s through the router each")
    parser.add_argument("--matrix", action=argparse.BooleanOptionalAction, default=True, help="streams by workers")
    parser.add_argument("--model", type=Path, help="folder of a model; default: a tiny one is made")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        model = args.model or make_model(Path(made) / "tiny")
        main(model, streams=args.streams, tokens=args.tokens, rate=args.rate, rounds=args.rounds)
        if args.matrix:
            matrix(model)
