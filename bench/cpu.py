"""The whole service beside transformers.generate: same folder, dtype and threads, in one run.

    python -m bench.cpu --model .models/SmolLM2-135M-Instruct

Prints tokens/s of one stream and of eight, prefill included on both sides, and the rate of a 512-token prompt to its first token.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from deploy.fetch_model import resolve
from tests.helpers.client import Client
from tests.helpers.cluster import Cluster

PROMPT, OUTPUT, LONG = 32, 128, 512
ROUNDS = 3


def prompts(count: int, length: int, *, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(1000, 40000) for _ in range(length)] for _ in range(count)]


def best(measure: Callable[[int], float]) -> float:
    """The best of ROUNDS, since the cores are shared with whatever else runs."""
    return max(measure(seed) for seed in range(ROUNDS))


def measure_transformers(model: Path, dtype: str, threads: int) -> dict[str, float]:
    """Runs in a process of its own (main --peer)."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()

    def generate(streams: int) -> Callable[[int], float]:
        def once(seed: int) -> float:
            ids = torch.tensor(prompts(streams, PROMPT, seed=seed))
            began = time.perf_counter()
            network.generate(
                ids, attention_mask=torch.ones_like(ids), min_new_tokens=OUTPUT, max_new_tokens=OUTPUT, do_sample=False
            )
            return streams * OUTPUT / (time.perf_counter() - began)

        return once

    def prefill(seed: int) -> float:
        ids = torch.tensor(prompts(1, LONG, seed=seed))
        began = time.perf_counter()
        network(ids, logits_to_keep=1)
        return LONG / (time.perf_counter() - began)

    with torch.inference_mode():
        generate(1)(99)
        return {"1 stream": best(generate(1)), "8 streams": best(generate(8)), "prefill 512": best(prefill)}


async def measure_service(client: Client) -> dict[str, float]:
    async def generate(streams: int, seed: int) -> float:
        await client.flush()
        began = time.perf_counter()
        sampling = {"max_tokens": OUTPUT, "ignore_eos": True}
        await asyncio.gather(
            *(client.generate(ids, sampling=sampling, timeout=300) for ids in prompts(streams, PROMPT, seed=seed))
        )
        return streams * OUTPUT / (time.perf_counter() - began)

    async def prefill(seed: int) -> float:
        await client.flush()
        began = time.perf_counter()
        await client.generate(prompts(1, LONG, seed=seed)[0], sampling={"max_tokens": 1}, timeout=300)
        return LONG / (time.perf_counter() - began)

    await generate(1, 99)
    return {
        "1 stream": max([await generate(1, seed) for seed in range(ROUNDS)]),
        "8 streams": max([await generate(8, seed) for seed in range(ROUNDS)]),
        "prefill 512": max([await prefill(seed) for seed in range(ROUNDS)]),
    }


def run_dtype(model: Path, dtype: str, threads: int) -> None:
    peer = subprocess.run(
        [sys.executable, "-m", "bench.cpu", "--peer", dtype, "--model", str(model), "--threads", str(threads)],
        check=True,
        capture_output=True,
        text=True,
    )
    theirs = json.loads(peer.stdout.splitlines()[-1])

    async def ours() -> dict[str, float]:
        async with cluster.client() as client:
            return await measure_service(client)

    with (
        tempfile.TemporaryDirectory() as logs,
        Cluster(Path(logs), model, worker_args=["--dtype", dtype, "--threads", str(threads)]) as cluster,
    ):
        mine = asyncio.run(ours())
        memory = {process.module: psutil.Process(process.pid).memory_info().rss >> 20 for process in cluster.processes}
    for name, goal in (("1 stream", 1.2), ("8 streams", 1.2), ("prefill 512", 1.0)):
        ratio = mine[name] / theirs[name]
        verdict = "met" if ratio >= goal else "MISSED"
        print(
            f"{dtype:<9} {name:<12} {mine[name]:>9.1f} {theirs[name]:>13.1f} {ratio:>6.2f}x   >= {goal:.1f}x {verdict}",
            flush=True,
        )
    print(f"{dtype:<9} resident memory, MiB: {', '.join(f'{name} {size}' for name, size in memory.items())}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="as of make run-local; default: the default model")
    parser.add_argument("--threads", type=int, default=2, help="torch threads of every process")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peer:
        print(json.dumps(measure_transformers(Path(args.model), args.peer, args.threads)))
        return
    print(f"tokens/s, best of {ROUNDS}; {PROMPT} in, {OUTPUT} out; {args.threads} threads")
    print(f"{'dtype':<9} {'what':<12} {'pdserve':>9} {'transformers':>13} {'ratio':>7}   goal")
    for dtype in args.dtypes:
        run_dtype(resolve(args.model), dtype, args.threads)


if __name__ == "__main__":
    main()
