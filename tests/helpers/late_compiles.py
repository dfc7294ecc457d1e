"""Prints the Triton kernels that a GPU engine compiled after it was built, one a line.

    python -m tests.helpers.late_compiles MODEL

A process of its own, for a kernel is compiled once in a process's life.
"""

from __future__ import annotations

import itertools
import random
import sys
from pathlib import Path
from typing import Any

import triton

from common.batch_sizes import BatchSizes
from common.core import SamplingParams
from common.engine.config import EngineConfig
from decode_worker.build import build_runner
from tests.helpers.engine_driver import EngineDriver

CHUNK_TOKENS = 4096
"""Past the captured steps, so that some are launched kernel by kernel."""
PARAMS = (
    SamplingParams(max_tokens=4, ignore_eos=True),
    SamplingParams(max_tokens=4, temperature=0.8, seed=1),
    SamplingParams(max_tokens=4, temperature=0.8, seed=1, top_p=0.9, top_k=40, min_p=0.01),
    SamplingParams(max_tokens=4, temperature=0.8, seed=1, repetition_penalty=1.2, logit_bias={5: 2.0}, min_tokens=2),
)


def main(model: Path) -> None:
    config = EngineConfig(
        model=model,
        device="cuda:0",
        dtype="bfloat16",
        page_size=64,
        pool_pages=400,
        chunk_tokens=CHUNK_TOKENS,
        table_rows=96,
        graph_sizes=BatchSizes((1, 8, 32)),
    )
    driver = EngineDriver(build_runner(config, None, lambda text: None))
    late: list[str] = []

    def compiled(*, src: Any, **_: Any) -> None:
        late.append(src.name)

    triton.knobs.compilation.listener = compiled
    rng, kinds = random.Random(0), itertools.cycle(PARAMS)
    for lengths in ([1], [7], [64], [999], [2049], [3000], [1] * 3, [1] * 11, [5] * 17, [300] * 9, [129] * 25):
        params = next(kinds)
        logprobs = 2 if params is PARAMS[-1] else None
        reqs = [
            driver.add([rng.randrange(3, 600) for _ in range(length)], max_tokens=4, params=params, logprobs=logprobs)
            for length in lengths
        ]
        driver.finish(reqs, chunk_tokens=CHUNK_TOKENS)
    print("\n".join(late))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
