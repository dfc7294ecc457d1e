"""The device sampler's time per step, advance included, in CUDA graphs: microseconds per level, batch size and vocabulary.

    python -m bench.gpu.sampling [--batch 1 8 64 256] [--vocab 128256 151936] [--std 1.28] [--profile]

Logits are bf16 and normal: as random weights make them, and the hardest for top_p, which then keeps half the vocabulary. --std 6
makes them as peaked as a model's. The copy of a step's logits from one buffer to another is timed beside, as the floor of a pass.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch

from common.core import Req, SamplingParams
from common.engine.cuda.sampling import DeviceSampler, Level, level_of
from common.engine.cuda.sampling_state import SamplingState

ROWS = 256
REPEATS = 30
CASES: dict[str, tuple[dict[str, Any], int | None]] = {
    "greedy": ({"temperature": 0.0}, None),
    "temp .8": ({"temperature": 0.8}, None),
    "min_p .1": ({"temperature": 0.8, "min_p": 0.1}, None),
    "top_k 50": ({"temperature": 0.8, "top_k": 50}, None),
    "top_p .95": ({"temperature": 0.8, "top_p": 0.95}, None),
    "k50 p.95": ({"temperature": 0.8, "top_k": 50, "top_p": 0.95}, None),
    "penalties": ({"temperature": 0.8, "repetition_penalty": 1.1}, None),
    "pen+p.95": ({"temperature": 0.8, "top_p": 0.95, "repetition_penalty": 1.1}, None),
    "logprobs 5": ({"temperature": 0.0}, 5),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--vocab", type=int, nargs="+", default=[128256, 151936])
    parser.add_argument("--std", type=float, default=1.28)
    parser.add_argument("--profile", action="store_true", help="also each kernel's time at the largest batch")
    args = parser.parse_args()
    print("vocab   rows " + "".join(f"{name:>11}" for name in [*CASES, "copy"]) + "   (us)")
    for vocab in args.vocab:
        bench_vocab(vocab, args.batch, args.std, profile=args.profile)


def bench_vocab(vocab: int, batches: list[int], std: float, *, profile: bool) -> None:
    device = torch.device("cuda")
    state = SamplingState(ROWS + 1, vocab, [2], device)
    sampler = DeviceSampler(state, ROWS)
    logits = (torch.randn(ROWS, vocab, device=device, generator=torch.Generator(device).manual_seed(0)) * std).bfloat16()
    other = torch.empty_like(logits)
    slots = torch.arange(ROWS, dtype=torch.int32, device=device)
    for rows in batches:
        times = []
        for params, logprobs in CASES.values():
            level = load(state, rows, params, logprobs)
            step = stepper(sampler, logits[:rows], slots[:rows], level)
            times.append(graph_us(step))
            if profile and rows == max(batches):
                print_kernels(step)
        times.append(graph_us(lambda rows=rows: other[:rows].copy_(logits[:rows])))  # type: ignore[misc]
        print(f"{vocab:<7} {rows:>4} " + "".join(f"{time:>11.1f}" for time in times), flush=True)


def load(state: SamplingState, rows: int, params: dict[str, Any], logprobs: int | None) -> Level:
    """Fills the slots with requests; returns the level they need."""
    reqs = [request(seed, params, logprobs) for seed in range(rows)]
    for slot, req in enumerate(reqs):
        state.load(slot, req, 0)
    state.flush()
    return level_of(reqs)


def request(seed: int, params: dict[str, Any], logprobs: int | None) -> Req:
    prompt = torch.arange(seed, seed + 1000, dtype=torch.int32)
    return Req(prompt, 0, 0, 100, seed, SamplingParams(seed=seed, **params), None, logprobs=logprobs)


def stepper(sampler: DeviceSampler, logits: torch.Tensor, slots: torch.Tensor, level: Level) -> Callable[[], None]:
    def step() -> None:
        sampler.sample(logits, slots, level)
        sampler.advance(slots)

    return step


def graph_us(step: Callable[[], object]) -> float:
    """The median over replays. The first call compiles, which a capture must not do."""
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    events: list[Any] = [torch.cuda.Event(enable_timing=True) for _ in range(REPEATS + 1)]
    graph.replay()
    for event in events[:-1]:
        event.record()
        graph.replay()
    events[-1].record()
    torch.cuda.synchronize()
    times: list[float] = sorted(first.elapsed_time(second) for first, second in zip(events, events[1:], strict=False))
    return times[REPEATS // 2] * 1000


def print_kernels(step: Callable[[], None]) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    kernels = sorted(profile.key_averages(), key=lambda kernel: -kernel.device_time_total)
    print("   ", ", ".join(f"{kernel.key} {kernel.device_time_total:.1f}" for kernel in kernels if kernel.device_time_total > 0))


if __name__ == "__main__":
    main()
