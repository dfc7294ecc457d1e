"""PeerStore: where a runner's kernels also store a prompt's KV while they compute it, in another worker's pool."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PeerStore:
    """base: device address of the peer's pool (common/engine/kv_pool.py's layout) as mapped in this process.
    page_ids: the peer's pages for tokens prefix_len, prefix_len + page_size, ...
    prefix_len: leading tokens (whole pages) that the peer holds: not stored.
    """

    base: int
    page_ids: tuple[int, ...]
    prefix_len: int
