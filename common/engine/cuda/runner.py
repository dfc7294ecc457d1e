"""CudaRunner: a model on one GPU; prefill steps launched kernel by kernel, their tokens sampled on the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from common.core import Batch, Context, Req, set_global_ctx
from common.engine.cuda.attention import CudaAttention
from common.engine.cuda.attention_kernels import PrefillKernel
from common.engine.cuda.inputs import PrefillInputs
from common.engine.cuda.page_table import CudaPageTable
from common.engine.cuda.prefill_graphs import PrefillGraphs, Shape
from common.engine.cuda.results import fetch
from common.engine.cuda.sampling import DeviceSampler, level_of
from common.engine.cuda.sampling_state import SamplingState
from common.engine.cuda.upload import UploadRing
from common.engine.kv_pool import KVPool
from common.engine.load import LoadedModel
from common.engine.peer_store import PeerStore
from common.engine.runner import Pending, Sampled

FIRST_TOKENS = 64
"""Sampled at once at the end of a prefill step; more are sampled in turns."""


class CudaRunner:
    """A Runner (common/engine/runner.py) for prefill. Owns the process's Context. Everything runs on the stream that is current
    in the engine's thread."""

    lookahead = 1

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        page_table: CudaPageTable,
        pool: KVPool,
        attention: CudaAttention,
        max_tokens: int,
    ) -> None:
        """max_tokens: of one prefill step."""
        self.compatibility = loaded.compatibility
        self.eos_token_ids = loaded.eos_token_ids
        self.shape = loaded.shape
        self.device = page_table.tensor.device
        self.page_table = page_table
        self.pool = pool
        self.attention = attention
        self._model = loaded.model
        self.max_tokens = max_tokens
        self._inputs = PrefillInputs(
            page_table, pool, max_tokens=max_tokens, max_reqs=max(page_table.rows, 8), device=self.device
        )
        self.sampling = SamplingState(FIRST_TOKENS + 1, loaded.shape.vocab_size, loaded.eos_token_ids, self.device)
        self._sampler = DeviceSampler(self.sampling, FIRST_TOKENS)
        self._rows = UploadRing(2 * FIRST_TOKENS, dtype=torch.int32, device=self.device)
        self._graphs: PrefillGraphs | None = None
        self._ctx = Context(page_size=page_table.page_size)
        self._ctx.page_table = page_table.tensor
        self._ctx.kv_cache = pool
        self._ctx.attn_backend = attention
        set_global_ctx(self._ctx)

    def run(self, batch: Batch) -> list[list[Sampled]]:
        return self.launch(batch).result()

    def launch(self, batch: Batch, stores: Mapping[Req, PeerStore] | None = None) -> Pending:
        with torch.inference_mode():
            if self._graphs is not None and (shape := self._graphs.shape_of(batch)) is not None:
                logits = self._graphs.launch(shape, batch, stores or {})
            else:
                logits = self.forward_prefill(batch, stores or {})
            return self.first_tokens(batch.reqs, logits)

    def forward_prefill(self, batch: Batch, stores: Mapping[Req, PeerStore]) -> torch.Tensor:
        """A step launched kernel by kernel, of any size: the logits of requests with is_last_chunk, in order, and padding."""
        self.attention.prefill.plan(self._inputs.prepare(batch, stores))
        return self.forward(batch)

    def forward(self, batch: Batch, prefill: PrefillKernel | None = None) -> torch.Tensor:
        """The layers alone: [rows, vocab_size] logits. The batch's fields are filled. prefill: instead of the usual kernel."""
        with self._ctx.forward_batch(batch), self.attention.prefilling_with(prefill):
            return self._model.forward()

    def capture_prefill(self, make_kernel: Callable[[Shape], PrefillKernel], shapes: list[Shape]) -> None:
        """Short steps are replayed from now on."""
        self._graphs = PrefillGraphs(self.forward, self._inputs, make_kernel=make_kernel, shapes=shapes)

    def first_tokens(self, reqs: Sequence[Req], logits: torch.Tensor) -> Pending:
        """logits: one row per request with is_last_chunk, in order; each gives n tokens."""
        last = [req for req in reqs if req.is_last_chunk]
        rows = [(row, req, req.completion + i) for row, req in enumerate(last) for i in range(req.n)]
        counts = [req.n if req.is_last_chunk else 0 for req in reqs]
        parts = [self._sample(rows[i : i + FIRST_TOKENS], logits) for i in range(0, len(rows), FIRST_TOKENS)]
        return FirstTokens(parts, counts)

    def _sample(self, rows: list[tuple[int, Req, int]], logits: torch.Tensor) -> Pending:
        """rows: (row of logits, request, completion) of each token."""
        reqs = [req for _, req, _ in rows]
        for slot, (_, req, completion) in enumerate(rows):
            self.sampling.load(slot, req, completion)
        self.sampling.flush()
        packed = np.array([range(len(rows)), [row for row, _, _ in rows]], dtype=np.int32)
        slots, picked = self._rows.upload(packed.ravel()).view(2, -1).unbind()
        level = level_of(reqs)
        self._sampler.sample(logits.index_select(0, picked), slots, level)
        return fetch(self._sampler, reqs, level)


class FirstTokens:
    """A Pending whose rows go back to their requests."""

    def __init__(self, parts: Sequence[Pending], counts: Sequence[int]) -> None:
        """counts: tokens of each request of the step; the parts have them end to end."""
        self._parts = parts
        self._counts = counts
        self._done = torch.cuda.Event()
        self._done.record()

    def result(self) -> list[list[Sampled]]:
        self._done.synchronize()  # Also without a token: what the step stored is complete, here and in peers' pools.
        tokens = iter([one for part in self._parts for (one,) in part.result()])
        return [[next(tokens) for _ in range(count)] for count in self._counts]
