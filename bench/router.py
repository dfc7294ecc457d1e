"""The router's own speed: fake workers in one process, the router, and this one client, on the same cores.

    python -m bench.router [--streams 128] [--tokens 400] [--rate 5000] [--model FOLDER]

Prints tokens/s delivered while decode emits as fast as flow control takes it, as text and as ids_only; the age of tokens on
arrival at a fixed rate; and what a token costs the router.
"""

from __future__ import annotations

import argparse
import asyncio
import mmap
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

from bench.router_worker import IDS, Times
from common.fingerprint import fingerprint
from common.model_dir import ModelDir
from common.rpc.gen.pdserve.v1 import generation_pb2
from tests.helpers.client import Client, request
from tests.helpers.cluster import Process, free_port

WARM_SECONDS = 1.0


@dataclass
class Measured:
    """One run. ages: seconds from the step to the client, of tokens after the first WARM_SECONDS."""

    tokens: int = 0
    deltas: int = 0
    first: float = 0.0
    last: float = 0.0
    router_cpu: float = 0.0
    router_rss: int = 0
    ages: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return self.tokens / (self.last - self.first)


async def load(address: str, times: Times, *, streams: int, tokens: int, ids_only: bool, pid: int) -> Measured:
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
    measured = measure(arrivals, times)
    measured.router_cpu, measured.router_rss = router_cpu, router.memory_info().rss
    return measured


def measure(arrivals: list[tuple[float, bytes]], times: Times) -> Measured:
    measured = Measured()
    for now, data in sorted(arrivals):
        event = generation_pb2.GenerateResponse.FromString(data)
        if event.WhichOneof("event") == "delta":
            measured.first = measured.first or now
            measured.last = now
            measured.deltas += 1
            measured.tokens += len(event.delta.token_ids)
            if now > measured.first + WARM_SECONDS:
                measured.ages += [now - times[token] for token in event.delta.token_ids]
    return measured


@contextmanager
def stand(model: Path, *, rate: float) -> Iterator[tuple[str, int, Times]]:
    """A router process and a worker process: the router's address and pid, and the steps' times."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        times = folder / "times"
        times.write_bytes(bytes(IDS * 8))
        address = f"127.0.0.1:{free_port()}"
        router = Process("router", ["--model", str(model), "--listen", address], log=folder / "router.log")
        arguments = ["--router", address, "--fingerprint", fingerprint(ModelDir.open(model)), "--times", str(times)]
        worker = Process("bench.router_worker", [*arguments, "--rate", str(rate)], log=folder / "worker.log")
        try:
            router.wait_for_line("router ready")
            with times.open("r+b") as file:
                shared = mmap.mmap(file.fileno(), IDS * 8)
                yield address, router.pid, memoryview(shared).cast("d")
        finally:
            router.kill()
            worker.kill()


def run(model: Path, *, rate: float, streams: int, tokens: int, ids_only: bool) -> Measured:
    with stand(model, rate=rate) as (address, pid, times):
        return uvloop.run(load(address, times, streams=streams, tokens=tokens, ids_only=ids_only, pid=pid))


def row(name: str, measured: Measured, *, with_age: bool) -> str:
    cost = measured.router_cpu / measured.tokens * 1e6
    age = "        -"
    if with_age:
        cuts = statistics.quantiles(measured.ages, n=100)
        age = f"{cuts[49] * 1e3:4.1f} / {cuts[98] * 1e3:4.1f}"
    per_delta = measured.tokens / measured.deltas
    return f"{name:34} {measured.rate:9,.0f} {per_delta:12.1f} {age:>14} {cost:9.1f} {measured.router_rss / 2**20:8.0f}"


def make_model(folder: Path) -> Path:
    """In a process of its own: it needs torch, whose memory and threads should not take part."""
    script = f"from tests.helpers.tiny_model import make_tiny_model; make_tiny_model({str(folder)!r})"
    subprocess.run([sys.executable, "-c", script], check=True)
    return folder


def main(model: Path, *, streams: int, tokens: int, rate: float) -> None:
    print(f"{streams} streams of {tokens} tokens; worker, router and client on {psutil.cpu_count()} cores")
    print(f"{'':34} {'tokens/s':>9} {'tokens/delta':>12} {'p50 / p99 ms':>14} {'router us':>9} {'RSS MiB':>8}")
    for name, ids_only in (("as fast as possible, text", False), ("as fast as possible, ids_only", True)):
        print(row(name, run(model, rate=0, streams=streams, tokens=tokens, ids_only=ids_only), with_age=False), flush=True)
    slow = max(2, int(rate * 6 / streams))
    measured = run(model, rate=rate, streams=streams, tokens=slow, ids_only=False)
    print(row(f"at {rate:,.0f} tokens/s, text", measured, with_age=True), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=600, help="per stream, as fast as possible")
    parser.add_argument("--rate", type=float, default=5000.0, help="tokens per second of the fixed run")
    parser.add_argument("--model", type=Path, help="folder of a model; default: a tiny one is made")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        main(args.model or make_model(Path(made) / "tiny"), streams=args.streams, tokens=args.tokens, rate=args.rate)
