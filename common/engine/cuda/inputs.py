"""PrefillInputs: one prefill step's inputs, laid out on the host and uploaded in one copy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from common.core import Batch, Req
from common.engine.cuda.attention import CudaMetadata
from common.engine.cuda.linear_plans import PLANNED_TOKENS
from common.engine.cuda.page_table import CudaPageTable
from common.engine.cuda.spans import PagedSpans, indptr
from common.engine.cuda.upload import UploadRing
from common.engine.kv_pool import KVPool
from common.engine.pages import pages_for
from common.engine.peer_store import PeerStore

LEAST = 2 * PLANNED_TOKENS
"""Tokens, and rows of logits, of a step launched kernel by kernel: of fewer, small_linear's kernels would be compiled first."""


class PrefillInputs:
    """Engine thread only. max_tokens: of one step."""

    def __init__(self, page_table: CudaPageTable, pool: KVPool, *, max_tokens: int, max_reqs: int, device: torch.device) -> None:
        self._table = page_table
        self._page_bytes = pool.page_bytes
        self._row_bytes = pool.tensor[0, 0, 0, 0].numel() * pool.tensor.itemsize
        # Per token: id, position, location, and an address of two words; per request: a row of two words.
        self._uploads = UploadRing(5 * max(max_tokens, LEAST) + 2 * max(max_reqs, LEAST), dtype=torch.int32, device=device)

    def prepare(self, batch: Batch, stores: Mapping[Req, PeerStore]) -> PagedSpans:
        """Fills batch.input_ids, positions, out_loc and attn_metadata; returns what the attention kernel plans with."""
        batch.padded_reqs = batch.reqs
        tokens = max(LEAST, sum(req.extend_len for req in batch.reqs))
        rows = max(LEAST, last) if (last := len(_logit_rows(batch.reqs))) else 0
        packed, spans = self.pack(batch.reqs, stores, tokens=tokens, rows=rows)
        self.fill(batch, self.upload(packed), tokens=tokens, rows=rows)
        return spans

    def pack(
        self, reqs: Sequence[Req], stores: Mapping[Req, PeerStore], *, tokens: int, rows: int
    ) -> tuple[NDArray[np.int32], PagedSpans]:
        """A step's inputs end to end, each padded to so many tokens or rows:

        | address, two words a token | row of logits, two words | id | position | location |
        """
        positions = [np.arange(req.cached_len, req.device_len, dtype=np.int32) for req in reqs]
        ids = [req.input_ids[req.cached_len : req.device_len].numpy() for req in reqs]
        locations = [self._locations(req, span) for req, span in zip(reqs, positions, strict=True)]
        packed = np.zeros(5 * tokens + 2 * rows, dtype=np.int32)
        wide, narrow = packed[: 2 * (tokens + rows)].view(np.int64), packed[2 * (tokens + rows) :].reshape(3, tokens)
        narrow[2] = -1
        count = sum(map(len, positions))
        if stores:
            wide[:count] = self._addresses(reqs, positions, stores)
        last = _logit_rows(reqs)
        wide[tokens : tokens + len(last)] = last
        if count:
            narrow[:, :count] = np.concatenate(ids), np.concatenate(positions), np.concatenate(locations)
        return packed, self._spans(reqs)

    def pack_nothing(self, tokens: int, reqs: int) -> tuple[NDArray[np.int32], PagedSpans]:
        """What a graph of this shape is captured with: padding, one request's as far as the attention kernel's plan can tell."""
        packed, _ = self.pack([], {}, tokens=tokens, rows=reqs)
        pages = np.full(pages_for(tokens, self._table.page_size), self._table.pages[self._table.dummy_row, 0], dtype=np.int32)
        length = np.array([tokens], dtype=np.int32)
        return packed, PagedSpans(query_len=length, kv_len=length, pages=pages, page_indptr=indptr([len(pages)]))

    def upload(self, packed: NDArray[np.int32]) -> torch.Tensor:
        """On the device, for the kernels launched next."""
        return self._uploads.upload(packed)

    def fill(self, batch: Batch, uploaded: torch.Tensor, *, tokens: int, rows: int) -> None:
        """The batch's fields as views of a packed upload."""
        wide, narrow = uploaded[: 2 * (tokens + rows)].view(torch.int64), uploaded[2 * (tokens + rows) :]
        batch.input_ids, batch.positions, batch.out_loc = narrow.view(3, tokens).unbind()
        batch.attn_metadata = CudaMetadata(logit_rows=wide[tokens:], peer_addr=wide[:tokens])

    def _locations(self, req: Req, positions: NDArray[np.int32]) -> NDArray[np.int32]:
        size = self._table.page_size
        locations: NDArray[np.int32] = self._table.pages[req.table_idx, positions // size] * size + positions % size
        return locations

    def _addresses(
        self, reqs: Sequence[Req], positions: Sequence[NDArray[np.int32]], stores: Mapping[Req, PeerStore]
    ) -> NDArray[np.int64]:
        """[tokens]: where layer 0's K of each token goes in its peer's pool; 0: nowhere."""
        parts = []
        for req, span in zip(reqs, positions, strict=True):
            if (store := stores.get(req)) is None:
                parts.append(np.zeros(len(span), dtype=np.int64))
                continue
            beyond = span.astype(np.int64) - store.prefix_len
            page, offset = np.divmod(np.maximum(beyond, 0), self._table.page_size)
            pages = np.asarray(store.page_ids, dtype=np.int64)[page]
            parts.append(np.where(beyond < 0, 0, store.base + pages * self._page_bytes + offset * self._row_bytes))
        return np.concatenate(parts)

    def _spans(self, reqs: Sequence[Req]) -> PagedSpans:
        pages = [self._table.pages[req.table_idx, : pages_for(req.device_len, self._table.page_size)] for req in reqs]
        return PagedSpans(
            query_len=np.array([req.extend_len for req in reqs], dtype=np.int32),
            kv_len=np.array([req.device_len for req in reqs], dtype=np.int32),
            pages=np.concatenate(pages) if pages else np.empty(0, dtype=np.int32),
            page_indptr=indptr([len(own) for own in pages]),
        )


def _logit_rows(reqs: Sequence[Req]) -> list[int]:
    """The last packed row of each request whose next token is wanted."""
    rows, end = [], 0
    for req in reqs:
        end += req.extend_len
        if req.is_last_chunk:
            rows.append(end - 1)
    return rows
