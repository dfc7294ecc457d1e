"""PagedSpans: what a prefill step attends to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


def indptr(counts: Sequence[int] | NDArray[np.int32]) -> NDArray[np.int32]:
    """Where each of so many begins, and the end: [len(counts) + 1]."""
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)


@dataclass(frozen=True)
class PagedSpans:
    """What a prefill step attends to, on the host. Per request, [requests]:

    | cached, from the pages | computed now: query_len |
    0                                                kv_len

    pages: each request's pages of its first kv_len tokens, end to end; page_indptr: [requests + 1], where each one's begin.
    """

    query_len: NDArray[np.int32]
    kv_len: NDArray[np.int32]
    pages: NDArray[np.int32]
    page_indptr: NDArray[np.int32]
