"""What a worker does before it says that it is ready: launches every kernel once that a request may be the first to need.

Triton compiles a kernel at its first launch with arguments of a kind, in tenths of a second each; a request should not wait for
that. tests/gpu/test_warm_up.py holds that nothing is compiled later.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from common.core import Batch, Req, SamplingParams
from common.engine.cuda import kernels
from common.engine.cuda.page_table import CudaPageTable
from common.engine.cuda.runner import CudaRunner
from common.engine.cuda.sampling_state import SamplingState
from common.engine.pages import pages_for

DRAWN = SamplingParams(temperature=1.0, seed=0)
FILTERED = replace(DRAWN, top_p=0.9)
FULL = replace(FILTERED, presence_penalty=0.1, logit_bias={0: 1.0}, min_tokens=1)
ONE_OF_EACH_LEVEL = (SamplingParams(), DRAWN, FILTERED, FULL)


def warm_up_prefill(runner: CudaRunner) -> None:
    """Steps of each kind. Before and after, pool and page table are unused; what the pool's pages hold has changed."""
    with torch.inference_mode():
        most = min(runner.max_tokens, runner.compatibility.max_context - 1, runner.pool.num_pages * runner.pool.page_size)
        if most > 0:
            for params in ONE_OF_EACH_LEVEL:
                _prefill(runner, 1, params)
            _prefill(runner, most)
        page = torch.zeros(1, dtype=torch.int32, device=runner.device)
        kernels.copy_pages(runner.pool.tensor, page, runner.pool.tensor.data_ptr(), page)
        torch.cuda.synchronize()


def warm_up_rows(sampling: SamplingState, table: CudaPageTable) -> None:
    """What loading a request onto the device takes."""
    sampling.load(0, _req(1, 0, FULL), 0)
    sampling.flush()
    with _row(table, 1):
        table.flush()


def _prefill(runner: CudaRunner, length: int, params: SamplingParams | None = None) -> None:
    """One step of a prompt of this length, launched kernel by kernel; with params, it also samples its first token."""
    with _row(runner.page_table, length) as row:
        req = _req(length, row, params or SamplingParams())
        req.take_chunk(length)
        logits = runner.forward_prefill(Batch([req], "prefill"), {})
        if params is not None:
            runner.first_tokens([req], logits).result()


@contextmanager
def _row(table: CudaPageTable, length: int) -> Iterator[int]:
    """A row with the pages from 0 on, for a request of this length."""
    row = table.take_row()
    table.assign(row, 0, range(pages_for(length, table.page_size)))
    yield row
    table.release_row(row)


def _req(length: int, row: int, params: SamplingParams) -> Req:
    ids = torch.zeros(length, dtype=torch.int32)
    return Req(ids, row, 0, 1, uid=-1, sampling_params=params, cache_handle=None, logprobs=1 if params is FULL else None)
