"""Line 3: prefill of one prompt, as a share of the measured matrix rate."""

from __future__ import annotations

from functools import partial

import torch

from bench.gpu.ceilings import Ceilings, median_seconds
from bench.gpu.engine import Engine, prefill_req
from common.core import Batch, Req

IN_A_ROW = 4
LENGTHS = (128, 512, 1024, 2048, 4096, 8192)


def prefill_flops(engine: Engine, length: int) -> float:
    """Products of every token, attention's two triangles, and one row of logits."""
    shape = engine.shape
    head = shape.vocab_size * shape.hidden_size
    products = 2 * length * (engine.matrix_elements - head) + 2 * head
    attention = 4 * shape.num_layers * shape.num_heads * shape.head_dim * length * (length + 1) / 2
    return float(products + attention)


def prefill_rows(engine: Engine, ceilings: Ceilings) -> list[dict[str, object]]:
    """alone: one step after an idle moment, its preparation included. in a row: of several, where the next one's overlaps."""
    rows: list[dict[str, object]] = []
    for length in LENGTHS:
        with prefill_req(engine, length) as req:
            alone = median_seconds(partial(_launch, engine, req, 1), repeat=9)
            in_a_row = median_seconds(partial(_launch, engine, req, IN_A_ROW), repeat=5) / IN_A_ROW
            torch.cuda.synchronize()
        flops = prefill_flops(engine, length)
        rows.append(
            {
                "model": engine.name,
                "tokens": length,
                "alone ms": alone * 1e3,
                "in a row ms": in_a_row * 1e3,
                "TFLOP/s": flops / in_a_row / 1e12,
                "% of product": 100 * flops / in_a_row / ceilings.flops_per_second,
            }
        )
    return rows


def _launch(engine: Engine, req: Req, times: int) -> None:
    for _ in range(times):
        engine.runner.launch(Batch([req], "prefill"))
