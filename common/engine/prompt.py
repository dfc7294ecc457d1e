"""Prompt: a request whose input is being computed, chunk by chunk.

0              cached_tokens    computed_len     req.cached_len     input_len
| prefix cache | chunks landed  | chunks in the air | to be launched |
'- locked by --'- owned by whoever has the prompt --------------------'
   req.cache_handle
"""

from __future__ import annotations

from array import array

from common.core import Req


class Prompt:
    """Engine thread only. Whoever has it gives it pages, sets req.cached_len and computed_len to what those hold, and a row.

    ids: the input. pages: all pages of the input in order: the locked prefix's, then its own. computed_len: leading tokens whose
    KV is there (launched chunks count for req.cached_len at once). in_flight: chunks in the air. cached_tokens: of the prefix
    cache, once has_started. is_broken: what is in the air lands unread.
    """

    def __init__(self, req: Req) -> None:
        self.req = req
        self.ids = array("i", req.input_ids.tolist())
        self.pages: list[int] = []
        self.computed_len = 0
        self.in_flight = 0
        self.has_started = False
        self.cached_tokens = 0
        self.is_broken = False

    @property
    def input_len(self) -> int:
        return len(self.ids)

    @property
    def remaining(self) -> int:
        """Tokens still to launch."""
        return max(0, self.input_len - self.req.cached_len)
