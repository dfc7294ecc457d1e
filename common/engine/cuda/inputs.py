"""PrefillInputs: one prefill step's inputs, laid out on the host and uploaded in one copy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from common.core import Batch, Req
from common.engine.cuda.attention import CudaMetadata
from common.engine.cuda.page_table import CudaPageTable
from common.engine.cuda.spans import PagedSpans
from common.engine.cuda.upload import UploadRing
from common.engine.kv_pool import KVPool
from common.engine.peer_store import PeerStore


class PrefillInputs:
    """Engine thread only. max_tokens: of one step."""

    def __init__(self, page_table: CudaPageTable, pool: KVPool, *, max_tokens: int, max_reqs: int, device: torch.device) -> None:
        self._table = page_table
        self._page_bytes = pool.page_bytes
        self._row_bytes = pool.tensor[0, 0, 0, 0].numel() * pool.tensor.itemsize
        # Per token: id, position, location, and an address of two words; per request: a row of two words.
        self._uploads = UploadRing(5 * max_tokens + 2 * max_reqs, dtype=torch.int32, device=device)

    def upload(self, batch: Batch, stores: Mapping[Req, PeerStore]) -> PagedSpans:
        """Fills batch.input_ids, positions, out_loc and attn_metadata; returns what the attention kernel plans with."""
        reqs = batch.reqs
        batch.padded_reqs = reqs
        positions = [np.arange(req.cached_len, req.device_len, dtype=np.int32) for req in reqs]
        rows = np.array(_logit_rows(reqs), dtype=np.int64)
        addresses = self._addresses(reqs, positions, stores) if stores else np.empty(0, dtype=np.int64)
        ids = [req.input_ids[req.cached_len : req.device_len].numpy() for req in reqs]
        locations = [self._locations(req, span) for req, span in zip(reqs, positions, strict=True)]
        packed = np.concatenate([addresses.view(np.int32), rows.view(np.int32), *ids, *positions, *locations])
        self._fill(batch, self._uploads.upload(packed), num_addresses=len(addresses), num_rows=len(rows))
        return self._spans(reqs)

    def _fill(self, batch: Batch, uploaded: torch.Tensor, *, num_addresses: int, num_rows: int) -> None:
        wide, narrow = uploaded[: 2 * (num_addresses + num_rows)].view(torch.int64), uploaded[2 * (num_addresses + num_rows) :]
        batch.input_ids, batch.positions, batch.out_loc = narrow.view(3, -1).unbind()
        every_row = num_rows == len(batch.input_ids)
        batch.attn_metadata = CudaMetadata(
            logit_rows=None if every_row else wide[num_addresses:],
            peer_addr=wide[:num_addresses] if num_addresses else None,
        )

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
        pages = [self._table.pages[req.table_idx, : -(-req.device_len // self._table.page_size)] for req in reqs]
        counts = [len(own) for own in pages]
        return PagedSpans(
            query_len=np.array([req.extend_len for req in reqs], dtype=np.int32),
            kv_len=np.array([req.device_len for req in reqs], dtype=np.int32),
            pages=np.concatenate(pages),
            page_indptr=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        )


def _logit_rows(reqs: Sequence[Req]) -> list[int]:
    """The last packed row of each request whose next token is wanted."""
    rows, end = [], 0
    for req in reqs:
        end += req.extend_len
        if req.is_last_chunk:
            rows.append(end - 1)
    return rows
