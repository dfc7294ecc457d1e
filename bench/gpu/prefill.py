"""Line 3: prefill of one prompt, as a share of the measured matrix rate."""

from __future__ import annotations

import torch

from bench.gpu.ceilings import Ceilings, median_seconds
from bench.gpu.engine import Engine, prefill_req
from common.core import Batch

LENGTHS = (128, 512, 1024, 2048, 4096, 8192)


def prefill_flops(engine: Engine, length: int) -> float:
    """Products of every token, attention's two triangles, and one row of logits."""
    shape = engine.shape
    head = shape.vocab_size * shape.hidden_size
    products = 2 * length * (engine.matrix_elements - head) + 2 * head
    attention = 4 * shape.num_layers * shape.num_heads * shape.head_dim * length * (length + 1) / 2
    return float(products + attention)


def prefill_rows(engine: Engine, ceilings: Ceilings) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for length in LENGTHS:
        with prefill_req(engine, length) as req:

            def step(req: object = req) -> None:
                engine.runner.launch(Batch([req], "prefill"))  # type: ignore[list-item]

            seconds = median_seconds(step, repeat=9)
            torch.cuda.synchronize()
        flops = prefill_flops(engine, length)
        rows.append(
            {
                "model": engine.name,
                "tokens": length,
                "ms": seconds * 1e3,
                "TFLOP/s": flops / seconds / 1e12,
                "% of product": 100 * flops / seconds / ceilings.flops_per_second,
            }
        )
    return rows
