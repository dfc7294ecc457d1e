"""GraphRunner: decode steps as captured CUDA graphs, launched before the last step's tokens are read.

A step is two graphs of its padded size, launched back to back; what they need lives on the device (device_rows.py):

    layers                                              sampling (one per level)          then
    gather rows -> embedding -> layers -> logits   |    sample -> advance rows       |    tokens to the host, an event
                                                   '- a grammar's masks (grammar_masks.py)

Requests are padded to a captured size with a dummy request, whose row stays at length 1 and whose page is nobody's.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from common.core import Batch, Req, SamplingParams
from common.engine.cuda import kernels
from common.engine.cuda.attention import CudaMetadata
from common.engine.cuda.capture import capture, uncollected
from common.engine.cuda.linear_plans import fastest_blas
from common.engine.cuda.page_table import CudaPageTable
from common.engine.cuda.results import SampledTokens, fetch
from common.engine.cuda.runner import CudaRunner
from common.engine.cuda.sampling import DeviceSampler, Level, level_of
from common.engine.cuda.sampling_state import SamplingState
from common.engine.cuda.upload import UploadRing
from common.engine.pages import pages_for
from common.engine.peer_store import PeerStore
from common.engine.runner import Pending, Sampled
from decode_worker.device_rows import DeviceRows
from decode_worker.grammar_masks import GrammarMasks, MaskSource

Launch = Callable[[], None]


class GraphRunner:
    """A Runner (common/engine/runner.py). Prefill steps go to the CudaRunner underneath."""

    lookahead = 1

    def __init__(
        self,
        runner: CudaRunner,
        *,
        sizes: Sequence[int],
        capture: bool,
        progress: Callable[[str], None],
        masks: MaskSource | None = None,
    ) -> None:
        """sizes: batch sizes to capture; the page table's rows are one of them, or will be. capture: False runs the same step
        launch by launch and without padding, for kernels that cannot be captured and to compare with. masks: of grammars, for
        decode steps; a prompt's first token is made without."""
        self._runner = runner
        self.compatibility = runner.compatibility
        self.eos_token_ids = runner.eos_token_ids
        self.page_table: CudaPageTable = runner.page_table
        self.pool = runner.pool
        self.shape = runner.shape
        rows = self.page_table.rows
        self._sizes = sorted({*(size for size in sizes if size < rows), rows}) if capture else []
        sampling = SamplingState(rows + 1, runner.shape.vocab_size, runner.eos_token_ids, runner.device)
        self._sampler = DeviceSampler(sampling, rows)
        self._rows = DeviceRows(rows, sampling=sampling, device=runner.device)
        self._dummy = _dummy_req(self.page_table.dummy_row)
        self._buffers = _Buffers(rows, self.page_table)
        self._uploads = UploadRing(rows, dtype=torch.int32, device=runner.device)
        self._batch_rows: list[int] = []
        self._masks = None if masks is None else GrammarMasks(masks, sampling)
        self._last: SampledTokens | None = None
        self._layers: dict[int, Launch] = {}
        self._sampling: dict[tuple[int, Level], Launch] = {}
        self._capture_all(progress)

    def run(self, batch: Batch) -> list[list[Sampled]]:
        return self.launch(batch).result()

    def launch(self, batch: Batch, stores: Mapping[Req, PeerStore] | None = None) -> Pending:
        if batch.is_prefill:
            return self._runner.launch(batch, stores)
        with torch.inference_mode():
            self.pad_batch(batch)
            self._rows.admit(batch.reqs)
            self._upload_rows(batch.padded_reqs)
            self.page_table.flush()
            self._plan(batch.padded_reqs)
            level = level_of(batch.reqs) if self._masks is None else self._masks.level_of(batch.reqs)
            self.replay(batch.padded_size, level, reqs=batch.reqs)
            self._last = fetch(self._sampler, batch.reqs, level)
            return self._last

    def replay(self, size: int, level: Level, *, reqs: Sequence[Req] = ()) -> None:
        """The step itself, of the rows that are on the device. reqs: theirs, whose grammars count."""
        logits: list[torch.Tensor] = []
        if self._sizes:
            self._layers[size]()
        else:
            self._forward(size, logits)
        if self._masks is not None:
            self._masks.upload(reqs, self._last)
        if self._sizes:
            self._sampling[size, level]()
        else:
            self._sample(size, level, logits)

    def pad_batch(self, batch: Batch) -> None:
        """Fills padded_reqs up to the next captured size."""
        size = self._sizes[bisect.bisect_left(self._sizes, batch.size)] if self._sizes else batch.size
        batch.padded_reqs = batch.reqs + [self._dummy] * (size - batch.size)

    def _upload_rows(self, reqs: Sequence[Req]) -> None:
        rows = [req.table_idx for req in reqs]
        if rows != self._batch_rows:
            self._batch_rows = rows
            self._buffers.rows[: len(rows)].copy_(self._uploads.upload(np.array(rows, dtype=np.int32)))

    def _plan(self, reqs: Sequence[Req]) -> None:
        decode = self._runner.attention.decode
        if decode.needs_plan:
            table = self.page_table
            lengths = [req.device_len for req in reqs]
            decode.plan(lengths, [table.pages[r.table_idx, : pages_for(r.device_len, table.page_size)] for r in reqs])

    # Once, at the start.

    def _capture_all(self, progress: Callable[[str], None]) -> None:
        """Largest first, so that the smaller graphs find their memory in the pool that all share."""
        self._buffers.rows.fill_(self.page_table.dummy_row)
        pool = torch.cuda.graph_pool_handle()
        with torch.inference_mode(), uncollected():
            for done, size in enumerate(reversed(self._sizes), start=1):
                self._capture_size(size, pool)
                progress(f"captured {done} of {len(self._sizes)} decode batch sizes")

    def _capture_size(self, size: int, pool: Any) -> None:
        self._plan([self._dummy] * size)
        logits: list[torch.Tensor] = []
        with fastest_blas(size):
            self._layers[size] = _captured(partial(self._forward, size, logits), pool)
        for level in Level:
            self._sampling[size, level] = _captured(partial(self._sample, size, level, logits), pool)

    def _forward(self, size: int, logits: list[torch.Tensor]) -> None:
        batch, buffers = Batch([self._dummy] * size, "decode"), self._buffers
        batch.padded_reqs = batch.reqs
        kernels.gather_step(
            buffers.rows[:size],
            token=self._rows.token,
            device_len=self._rows.device_len,
            page_table=self.page_table.tensor,
            input_ids=buffers.input_ids[:size],
            positions=buffers.positions[:size],
            seq_lens=buffers.seq_lens[:size],
            out_loc=buffers.out_loc[:size],
            block_tables=buffers.block_tables[:size],
            page_size=self.page_table.page_size,
        )
        batch.input_ids, batch.positions = buffers.input_ids[:size], buffers.positions[:size]
        batch.out_loc = buffers.out_loc[:size]
        batch.attn_metadata = CudaMetadata(None, block_tables=buffers.block_tables[:size], seq_lens=buffers.seq_lens[:size])
        logits[:] = [self._runner.forward(batch)]

    def _sample(self, size: int, level: Level, logits: list[torch.Tensor]) -> None:
        rows, sampler = self._buffers.rows[:size], self._sampler
        sampler.sample(logits[0], rows, level)
        kernels.advance(
            rows,
            sampler.tokens[:size],
            token=self._rows.token,
            device_len=self._rows.device_len,
            dummy_slot=self.page_table.dummy_row,
        )
        sampler.advance(rows)


class _Buffers:
    """A step's inputs in batch order, at fixed addresses."""

    def __init__(self, size: int, table: CudaPageTable) -> None:
        device = table.tensor.device

        def ints() -> torch.Tensor:
            return torch.zeros(size, dtype=torch.int32, device=device)

        self.rows, self.input_ids, self.positions, self.seq_lens, self.out_loc = ints(), ints(), ints(), ints(), ints()
        self.block_tables = torch.zeros(size, table.pages.shape[1], dtype=torch.int32, device=device)


def _captured(body: Launch, pool: Any) -> Launch:
    """body as one launch. It is run once before, which compiles and allocates what it needs."""
    body()
    torch.cuda.synchronize()
    _, replay = capture(body, pool)
    return replay


def _dummy_req(row: int) -> Req:
    """One token, nothing more to come."""
    return Req(
        input_ids=torch.zeros(1, dtype=torch.int32),
        table_idx=row,
        cached_len=0,
        output_len=0,
        uid=-1,
        sampling_params=SamplingParams(),
        cache_handle=None,
    )
