"""Attention over paged KV: the seam between models and kernels, and the one that torch alone computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from common.core import Batch, Context, Req
from common.engine.chunk_attention import attend_chunk, block_mask
from common.engine.layers import Unnormed
from common.engine.rotary import AttentionHeads, RotaryRows

GROUP_BYTES = 4 << 20
"""A group of decoding requests gathers about this much K and V of a layer at once, so that it is still in the cache when read."""


class AttentionMetadata(Protocol):
    """What a backend works out once per step. logit_rows: [rows] int64, the packed rows whose logits are wanted, the last one
    of each request with is_last_chunk; None: every row."""

    logit_rows: torch.Tensor | None


class AttentionBackend(Protocol):
    def prepare_metadata(self, batch: Batch) -> None:
        """Fills batch.attn_metadata. batch.out_loc and the requests' page table rows are in place."""

    def forward(
        self, qkv: torch.Tensor, heads: AttentionHeads, layer: int, batch: Batch, unnormed: Unnormed | None = None
    ) -> torch.Tensor:
        """Norms (where heads has norms) and rotates q and k by batch.positions, stores k and v at batch.out_loc, then attends
        from each token to its request's tokens up to itself.

        qkv: [tokens, (num_heads + 2 * num_kv_heads) * head_dim], as the projection made it; with unnormed, which only the same
        device's Ops make, it is divided first. Returns [tokens, num_heads * head_dim]."""


@dataclass
class _DecodeGroup:
    """Requests that compute one token each, attended together.

    rows: their packed rows, a slice. block_rows: [num_layers, 2 * requests * pages]. length: tokens that K and V are cut to.
    mask: [requests, 1, 1, length] additive, None if all requests have that length.
    """

    rows: slice
    block_rows: torch.Tensor
    num_pages: int
    length: int
    mask: torch.Tensor | None


@dataclass
class _Chunk:
    """One request that computes several tokens.

    | cached (from the pages) | computed now: rows |
    0                      cached_len         device_len = length

    block_rows: [num_layers, 2 * pages], None if nothing is cached: then K and V are those just computed. mask: see block_mask.
    """

    rows: slice
    length: int
    block_rows: torch.Tensor | None
    mask: torch.Tensor


@dataclass
class TorchMetadata:
    """token_rows: [num_layers, 2, tokens], where K and V are stored. rotations: of all layers, made by the first one."""

    logit_rows: torch.Tensor | None
    token_rows: torch.Tensor
    groups: list[_DecodeGroup]
    chunks: list[_Chunk]
    rotations: RotaryRows | None = None


class TorchAttention:
    """An AttentionBackend that gathers whole pages: chunks in blocks of queries, decoding requests in padded groups.

    On any device and in any dtype: what kernels are compared with."""

    def __init__(self, ctx: Context, *, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
        self._ctx = ctx
        self._pool = ctx.kv_cache
        self._num_kv_heads = num_kv_heads
        self._group = num_heads // num_kv_heads
        self._head_dim = head_dim
        self._dtype = dtype
        self._group_tokens = GROUP_BYTES // (2 * num_kv_heads * head_dim * dtype.itemsize)

    # Once per step.

    def prepare_metadata(self, batch: Batch) -> None:
        groups, chunks = [], []
        start = 0
        singles: list[Req] = []
        for req in batch.padded_reqs:
            if req.extend_len == 1:
                singles.append(req)
            else:
                groups += self._decode_groups(singles, start)
                start += len(singles)
                singles = []
                chunks.append(self._chunk(req, start))
                start += req.extend_len
        groups += self._decode_groups(singles, start)
        batch.attn_metadata = TorchMetadata(
            logit_rows=_logit_rows(batch.padded_reqs, batch.out_loc.device),
            token_rows=self._pool.token_rows(batch.out_loc),
            groups=groups,
            chunks=chunks,
        )

    def _decode_groups(self, reqs: Sequence[Req], start: int) -> list[_DecodeGroup]:
        """reqs: neighbours in the batch, the first one's row is start."""
        sizes = split_by_length([req.device_len for req in reqs], max_tokens=self._group_tokens)
        groups = []
        for size in sizes:
            groups.append(self._decode_group(reqs[:size], start))
            reqs, start = reqs[size:], start + size
        return groups

    def _decode_group(self, reqs: Sequence[Req], start: int) -> _DecodeGroup:
        lengths = torch.tensor([req.device_len for req in reqs], device=self._ctx.page_table.device)
        longest = max(req.device_len for req in reqs)
        shortest = min(req.device_len for req in reqs)
        pages = self._pages(reqs, lengths, longest)
        mask = None
        if shortest < longest:
            # Not a bool mask: scaled_dot_product_attention would convert that in every layer.
            beyond = torch.arange(longest, device=lengths.device) >= lengths[:, None]
            mask = torch.zeros(beyond.shape, dtype=self._dtype, device=beyond.device).masked_fill_(beyond, float("-inf"))
            mask = mask[:, None, None]
        block_rows = self._pool.block_rows(pages.flatten()).flatten(1)
        return _DecodeGroup(slice(start, start + len(reqs)), block_rows, pages.shape[1], longest, mask)

    def _pages(self, reqs: Sequence[Req], lengths: torch.Tensor, longest: int) -> torch.Tensor:
        """[requests, pages of the longest]; a shorter request repeats its last page, so that no other's bytes are read."""
        table, page_size = self._ctx.page_table, self._ctx.page_size
        rows = torch.tensor([req.table_idx for req in reqs], device=table.device)
        first_tokens = torch.arange(0, longest, page_size, device=table.device)
        return table[rows[:, None], torch.minimum(first_tokens, lengths[:, None] - 1)].long() // page_size

    def _chunk(self, req: Req, start: int) -> _Chunk:
        rows = slice(start, start + req.extend_len)
        mask = block_mask(req.extend_len, self._group, self._ctx.page_table.device)
        if req.cached_len == 0:
            return _Chunk(rows, req.device_len, None, mask)
        pages = self._ctx.page_table[req.table_idx, : req.device_len : self._ctx.page_size].long() // self._ctx.page_size
        return _Chunk(rows, req.device_len, self._pool.block_rows(pages).flatten(1), mask)

    # Once per layer.

    def forward(
        self, qkv: torch.Tensor, heads: AttentionHeads, layer: int, batch: Batch, unnormed: Unnormed | None = None
    ) -> torch.Tensor:
        metadata = batch.attn_metadata
        assert isinstance(metadata, TorchMetadata) and unnormed is None
        if metadata.rotations is None:
            metadata.rotations = heads.rotary.rows(batch.positions)
        q, k, v = heads.split(qkv, metadata.rotations)
        self._pool.store_rows(k, v, metadata.token_rows[layer])
        parts = [(group.rows, self._attend_group(q[group.rows], group, layer)) for group in metadata.groups]
        parts += [
            (chunk.rows, self._attend_chunk(q[chunk.rows], k[chunk.rows], v[chunk.rows], chunk, layer))
            for chunk in metadata.chunks
        ]
        if len(parts) == 1:
            return parts[0][1]
        out = q.new_empty(len(q), q.shape[1] * q.shape[2])
        for rows, part in parts:
            out[rows] = part
        return out

    def _attend_group(self, q: torch.Tensor, group: _DecodeGroup, layer: int) -> torch.Tensor:
        """The query heads that share a KV head stand in for query positions: one product serves them all."""
        size = len(q)
        kv = self._gather(group.block_rows[layer], size)[:, :, : group.length].transpose(2, 3)
        out = F.scaled_dot_product_attention(
            q.view(size, self._num_kv_heads, self._group, self._head_dim), kv[0], kv[1], group.mask
        )
        return out.reshape(size, -1)

    def _attend_chunk(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, chunk: _Chunk, layer: int) -> torch.Tensor:
        if chunk.block_rows is not None:
            k, v = self._gather(chunk.block_rows[layer], 1)[:, 0, : chunk.length].unbind()
        return attend_chunk(q, k, v, chunk.mask)

    def _gather(self, block_rows: torch.Tensor, requests: int) -> torch.Tensor:
        """[2 (K, V), requests, tokens of whole pages, num_kv_heads, head_dim]"""
        return self._pool.blocks.index_select(0, block_rows).view(2, requests, -1, self._num_kv_heads, self._head_dim)


def split_by_length(lengths: Sequence[int], *, max_tokens: int) -> list[int]:
    """Cuts a sequence of requests into neighbouring groups; returns their sizes.

    Within a group all are padded to the longest: a group ends before it would pad by more than a half or exceed max_tokens."""
    sizes: list[int] = []
    longest = total = count = 0
    for length in lengths:
        new_longest = max(longest, length)
        padded = new_longest * (count + 1)
        if count and (padded > max_tokens or padded > 1.5 * (total + length)):
            sizes.append(count)
            longest = total = count = 0
            new_longest = length
        longest, total, count = new_longest, total + length, count + 1
    return [*sizes, count] if count else sizes


def _logit_rows(reqs: Sequence[Req], device: torch.device) -> torch.Tensor | None:
    rows, row = [], -1
    for req in reqs:
        row += req.extend_len
        if req.is_last_chunk:
            rows.append(row)
    return None if len(rows) == row + 1 else torch.tensor(rows, dtype=torch.int64, device=device)
