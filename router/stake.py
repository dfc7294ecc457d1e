"""Stake: what one attempt adds to the loads of its workers, taken back part by part as its parts end.

           submitted            joined                 left
prefill    | its tokens, one request |
decode     | coming                  | a completion, its pages |      each member by itself
"""

from __future__ import annotations

import time
from collections.abc import Callable

from router.fleet.estimate import Part
from router.fleet.placement import Pair


class Stake:
    """Of n members; each joins at most once and leaves once."""

    def __init__(
        self,
        pair: Pair,
        *,
        members: int,
        tokens: int,
        pages: int,
        on_freed: Callable[[int], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """tokens: of the prompt. pages: of the decode worker, for all members.
        on_freed(tokens): something was taken back; tokens: of a prompt that has been computed, else 0."""
        self._pair = pair
        self._members = members
        self._pages_each = -(-pages // members)
        self._clock, self._on_freed = clock, on_freed
        self._tokens = pair.prefill.tokens.begin(tokens)
        self._request = pair.prefill.completions.begin(0 if pair.is_alone else 1)
        self._is_prefilling = True
        self._is_cached_known = False
        self._joined: list[tuple[Part, Part]] = []
        self._come(members)
        pair.prefill.pace.note(clock(), is_busy=True)

    def cached(self, tokens: int) -> None:
        """So many of the prompt's tokens need no computing. May be told more than once: the first word counts."""
        if self._is_prefilling and not self._is_cached_known:
            self._is_cached_known = True
            self._tokens.end(tokens)

    def joined(self) -> None:
        """The decode worker has taken over one of its completions, so the prompt is computed."""
        self._end_prefill(is_computed=True)
        if (decode := self._pair.decode) is not None:
            self._come(-1)
            self._joined.append((decode.completions.begin(1), decode.pages.begin(self._pages_each)))

    def left(self, *, had_joined: bool, is_computed: bool) -> None:
        """One of its completions is over or was taken away. is_computed: its prompt was computed."""
        self._members -= 1
        if not had_joined:
            self._come(-1)
        elif self._joined:
            for part in self._joined.pop():
                part.end()
        if is_computed or self._members == 0:
            self._end_prefill(is_computed=is_computed)
        self._on_freed(0)

    def _come(self, members: int) -> None:
        if (decode := self._pair.decode) is not None:
            decode.coming.requests += members
            decode.coming.pages += members * self._pages_each

    def _end_prefill(self, *, is_computed: bool) -> None:
        if not self._is_prefilling:
            return
        self._is_prefilling = False
        worker, prompts, tokens = self._pair.prefill, int(is_computed), self._tokens.amount if is_computed else 0
        self._tokens.end()
        self._request.end()
        worker.pace.note(self._clock(), is_busy=worker.tokens.ours > 0, prompts=prompts, tokens=tokens)
        self._on_freed(tokens)
