"""Engines for benchmarks: random weights of a known geometry, requests whose KV is already there."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.geometries import write_model
from common.batch_sizes import BatchSizes
from common.core import Req, SamplingParams
from common.engine.config import EngineConfig
from common.engine.cuda.sampling import Level, level_of
from common.engine.model_config import ModelConfig
from common.engine.pages import pages_for
from decode_worker.build import build_runner
from decode_worker.graph_runner import GraphRunner


@dataclass(frozen=True)
class Engine:
    """matrix_elements: weights that every decode step multiplies with, the head included, the embedding not."""

    name: str
    runner: GraphRunner
    shape: ModelConfig
    matrix_elements: int
    chunk_tokens: int

    @property
    def matrix_bytes(self) -> int:
        return self.matrix_elements * self.runner.pool.tensor.itemsize

    @property
    def kv_bytes_per_token(self) -> int:
        shape = self.shape
        return shape.num_layers * 2 * shape.num_kv_heads * shape.head_dim * self.runner.pool.tensor.itemsize

    def level(self, reqs: Sequence[Req]) -> Level:
        return level_of(reqs)


def matrix_elements(shape: ModelConfig) -> int:
    q, kv = shape.num_heads * shape.head_dim, 2 * shape.num_kv_heads * shape.head_dim
    layer = shape.hidden_size * (q + kv) + q * shape.hidden_size + 3 * shape.hidden_size * shape.intermediate_size
    return shape.num_layers * layer + shape.vocab_size * shape.hidden_size


def load(name: str, *, graph_sizes: Sequence[int], max_context: int, pool_pages: int, chunk_tokens: int) -> Engine:
    """An engine with both roles on the current device. One per process."""
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), name, max_context=max_context)
        config = EngineConfig(
            model=Path(folder),
            device="cuda:0",
            dtype="bfloat16",
            page_size=64,
            pool_pages=pool_pages,
            max_context=max_context,
            table_rows=max(graph_sizes),
            load_format="dummy",
            chunk_tokens=chunk_tokens,
            graph_sizes=BatchSizes(graph_sizes),
        )
        runner = build_runner(config, None, lambda line: print(f"  {line}", flush=True))
    assert isinstance(runner, GraphRunner)
    shape = runner.shape
    # Zeros would flatter: they compress in flight and hide wrong addresses.
    runner.pool.tensor.normal_(std=0.5)
    return Engine(name, runner, shape, matrix_elements(shape), chunk_tokens)


@contextmanager
def decode_reqs(engine: Engine, count: int, *, context: int, params: SamplingParams) -> Iterator[list[Req]]:
    """Requests whose next token attends to `context` tokens; pages are dealt out in a shuffled order."""
    table = engine.runner.page_table
    each = pages_for(context + params.max_tokens, table.page_size)
    pages = torch.randperm(engine.runner.pool.num_pages - 1)[: count * each].tolist()
    assert len(pages) == count * each, f"the pool is too small for {count} requests of {each} pages"
    reqs = []
    for i in range(count):
        ids = torch.randint(engine.shape.vocab_size, (context,), dtype=torch.int32)
        req = Req(ids, table.take_row(), context - 1, params.max_tokens, i, params, None)
        table.assign(req.table_idx, 0, pages[i * each : (i + 1) * each])
        reqs.append(req)
    yield reqs
    for req in reqs:
        table.release_row(req.table_idx)


@contextmanager
def prefill_req(engine: Engine, length: int) -> Iterator[Req]:
    """A request with nothing cached."""
    table = engine.runner.page_table
    ids = torch.randint(engine.shape.vocab_size, (length,), dtype=torch.int32)
    req = Req(ids, table.take_row(), 0, 8, 0, SamplingParams(), None)
    table.assign(req.table_idx, 0, list(range(pages_for(length, table.page_size))))
    yield req
    table.release_row(req.table_idx)
