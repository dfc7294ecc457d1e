"""GrammarMasks: which tokens a grammar allows next, put between a step's layers and its sampling.

    device   | sample N |  layers N + 1  ......................... | mask | sample N + 1 |
    host            '- token N read -> next_mask() -> upload queued -'

So a grammar costs its step nothing as long as reading a token and finding its mask takes less than the layers. Who has grammars
gives GraphRunner a MaskSource; nobody does yet (docs/architecture.md, seams left open).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from common.core import Req
from common.engine.cuda.sampling import Level, level_of
from common.engine.cuda.sampling_state import SamplingState


class MaskSource(Protocol):
    """The grammars of the requests that have one. Engine thread only."""

    def covers(self, req: Req) -> bool:
        """Whether this request has a grammar, on every step of its life."""

    def next_mask(self, req: Req, token: int | None) -> NDArray[np.int32] | None:
        """What may follow: token i if bit i % 32 of word i // 32 is set; None: anything. Called once a step, in order.

        token: the newest one, which req.input_ids does not have yet; None: it has them all."""


class NewestTokens(Protocol):
    def tokens(self) -> Mapping[Req, int]:
        """Waits for a step's tokens."""


class GrammarMasks:
    def __init__(self, source: MaskSource, sampling: SamplingState) -> None:
        self._source = source
        self._sampling = sampling

    def level_of(self, reqs: Sequence[Req]) -> Level:
        """Of a step of these: masks are looked at by the highest alone."""
        return Level.FULL if any(map(self._source.covers, reqs)) else level_of(reqs)

    def upload(self, reqs: Sequence[Req], last: NewestTokens | None) -> None:
        """The masks of a step whose layers are launched, in the order of the current stream. last: the decode step before."""
        for req in filter(self._source.covers, reqs):
            token: int | None = None
            if req.device_len > len(req.input_ids):
                assert last is not None, f"{req!r} has a token that no step has made"
                token = last.tokens()[req]
            self._sampling.set_mask(req.table_idx, self._source.next_mask(req, token))
