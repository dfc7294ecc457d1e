"""Line 1: the decode step alone, sampling included, over its floor at every batch size.

floor = max(weight bytes / copy rate, FLOPs / matrix rate) + KV bytes / copy rate: a layer's products and its attention follow
each other.
"""

from __future__ import annotations

import statistics

import torch

from bench.gpu.ceilings import Ceilings
from bench.gpu.engine import Engine, decode_reqs
from common.core import Batch, SamplingParams

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXT = 1024
REPLAYS = 20
SAMPLES = 5
GREEDY = SamplingParams(max_tokens=512, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=512, ignore_eos=True, temperature=0.8, top_p=0.95, seed=1)


def floor_seconds(engine: Engine, batch: int, ceilings: Ceilings, *, context: int = CONTEXT) -> float:
    weights = max(engine.matrix_bytes / ceilings.bytes_per_second, 2 * batch * engine.matrix_elements / ceilings.flops_per_second)
    return weights + batch * context * engine.kv_bytes_per_token / ceilings.bytes_per_second


def decode_rows(engine: Engine, ceilings: Ceilings) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for batch in BATCH_SIZES:
        floor = floor_seconds(engine, batch, ceilings)
        greedy, sampled = (step_seconds(engine, batch, params) for params in (GREEDY, SAMPLED))
        rows.append(
            {
                "model": engine.name,
                "batch": batch,
                "floor ms": floor * 1e3,
                "greedy ms": greedy * 1e3,
                "x floor": greedy / floor,
                "sampled ms": sampled * 1e3,
                "tokens/s": batch / greedy,
            }
        )
    return rows


def step_seconds(engine: Engine, batch: int, params: SamplingParams, *, context: int = CONTEXT) -> float:
    """One replay of the captured step, by device events over REPLAYS in a row, whose lengths are context on average."""
    times: list[float] = []
    for _ in range(SAMPLES):
        with decode_reqs(engine, batch, context=context - REPLAYS // 2, params=params) as reqs:
            step = Batch(reqs, "decode")
            engine.runner.run(step)  # Loads the rows.
            size, level = step.padded_size, engine.level(reqs)
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(REPLAYS):
                engine.runner.replay(size, level)
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3 / REPLAYS)
    return statistics.median(times)
