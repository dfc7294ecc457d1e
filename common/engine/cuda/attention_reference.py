"""The attention kernels' reference, in plain torch and float32: slow, for comparison and for what no kernel serves."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from common.engine.cuda.spans import PagedSpans


class TorchPrefill:
    """A PrefillKernel that gathers each request's pages."""

    def __init__(self) -> None:
        self._spans: PagedSpans

    def plan(self, spans: PagedSpans) -> None:
        self._spans = spans

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
        spans, row = self._spans, 0
        for i, (query_len, kv_len) in enumerate(zip(spans.query_len.tolist(), spans.kv_len.tolist(), strict=True)):
            pages = spans.pages[spans.page_indptr[i] : spans.page_indptr[i + 1]]
            rows = slice(row, row + query_len)
            out[rows] = _attend(q[rows], _gather(k, pages, kv_len), _gather(v, pages, kv_len))
            row += query_len


class TorchDecode:
    """A DecodeKernel that gathers each request's pages. It cannot be captured: its shapes are the lengths'."""

    needs_plan = True
    can_capture = False

    def __init__(self) -> None:
        self._lengths: Sequence[int] = ()
        self._pages: Sequence[NDArray[np.int32]] = ()

    def plan(self, lengths: Sequence[int], pages: Sequence[NDArray[np.int32]]) -> None:
        self._lengths, self._pages = lengths, pages

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        for i, (length, pages) in enumerate(zip(self._lengths, self._pages, strict=True)):
            out[i : i + 1] = _attend(q[i : i + 1], _gather(k, pages, length), _gather(v, pages, length))


def _gather(pool: torch.Tensor, pages: NDArray[np.int32], length: int) -> torch.Tensor:
    """The first length tokens in these pages: [length, num_kv_heads, head_dim] float32."""
    ids = torch.from_numpy(pages.astype(np.int64)).to(pool.device)
    return pool.index_select(0, ids).flatten(0, 1)[:length].float()


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """q: [queries, num_heads, head_dim], the last queries of k, v: [length, num_kv_heads, head_dim] float32."""
    queries, num_heads, head_dim = q.shape
    length, num_kv_heads, _ = k.shape
    grouped = q.float().view(queries, num_kv_heads, -1, head_dim)
    scores = torch.einsum("qhgd,khd->hgqk", grouped, k) * head_dim**-0.5
    positions = torch.arange(length, device=q.device)
    beyond = positions > positions[length - queries :, None]
    weights = scores.masked_fill(beyond, float("-inf")).softmax(dim=-1)
    return torch.einsum("hgqk,khd->qhgd", weights, v).reshape(queries, num_heads, head_dim).to(q.dtype)
