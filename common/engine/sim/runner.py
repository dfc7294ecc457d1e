"""SimRunner: a Runner that takes a step's time and says what the simulated language says, over pages that hold tags."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from common.core import Batch, Req
from common.engine.peer_store import PeerStore
from common.engine.runner import Pending, Sampled
from common.engine.sim.clock import SimClock
from common.engine.sim.pages import SimPool, SimRows, Tag
from common.engine.sim.profile import SimProfile
from common.engine.sim.tokens import EMPTY, SimVocabulary, chain
from common.work import Compatibility


class _Done(NamedTuple):
    """A Pending of a step whose results the engine holds back until the clock says so."""

    tokens: list[list[Sampled]]

    def result(self) -> list[list[Sampled]]:
        return self.tokens


@dataclass
class _Sequence:
    """What is known of a row's request: the chain of its first `length` ids, whose pages' tags were right."""

    req: Req
    length: int = 0
    chain: int = EMPTY


class SimRunner:
    """See Runner. A page that holds other tokens than were computed or handed over raises AssertionError: it ends the engine."""

    lookahead = 0

    def __init__(
        self,
        *,
        compatibility: Compatibility,
        vocabulary: SimVocabulary,
        pool: SimPool,
        page_table: SimRows,
        profile: SimProfile,
        clock: SimClock,
    ) -> None:
        self.compatibility = compatibility
        self.eos_token_ids = vocabulary.eos_token_ids
        self.page_table = page_table
        self.pool = pool
        self._vocabulary = vocabulary
        self._profile = profile
        self._clock = clock
        self._sequences: dict[int, _Sequence] = {}
        """By row."""

    def launch(self, batch: Batch, stores: Mapping[Req, PeerStore] | None = None) -> Pending:
        assert not stores, "a simulated engine stores into its own pool alone"
        batch.padded_reqs = batch.reqs
        if batch.is_prefill:
            seconds = self._profile.prefill_seconds([(req.cached_len, req.device_len) for req in batch.reqs])
        else:
            seconds = self._profile.decode_seconds([req.device_len for req in batch.reqs])
        self._clock.spend(seconds)
        return _Done([self._compute(req) for req in batch.reqs])

    def run(self, batch: Batch) -> list[list[Sampled]]:
        return self.launch(batch).result()

    def _compute(self, req: Req) -> list[Sampled]:
        assert req.cached_len < req.device_len <= req.max_device_len, f"{req} has nothing to compute"
        known = self._known(req)
        self._write(known, req)
        if not req.is_last_chunk:
            return []
        index = req.device_len - req.prompt_len
        return [
            self._vocabulary.sample(
                known.chain, req.sampling_params, completion=req.completion + which, index=index, logprobs=req.logprobs
            )
            for which in range(req.n)
        ]

    def _known(self, req: Req) -> _Sequence:
        """Of the request's first cached_len ids; at its first step here from the pages that hold them."""
        known = self._sequences.get(req.table_idx)
        if known is None or known.req is not req:
            known = self._sequences[req.table_idx] = _Sequence(req)
            while known.length < req.cached_len:
                self._go_on(known, req.cached_len)
                self._check_page(known)
        assert known.length == req.cached_len, f"{req}: {known.length} tokens were computed here"
        if known.length % self.pool.page_size:
            self._check_page(known)
        return known

    def _write(self, known: _Sequence, req: Req) -> None:
        while known.length < req.device_len:
            self._go_on(known, req.device_len)
            self.pool.write(*self._tag(known))

    def _go_on(self, known: _Sequence, end: int) -> None:
        """To the end of the page under way, or to end if that comes first."""
        size = self.pool.page_size
        to = min(end, (known.length // size + 1) * size)
        known.chain = chain(known.req.input_ids[known.length : to].tolist(), known.chain)
        known.length = to

    def _tag(self, known: _Sequence) -> tuple[int, Tag]:
        """The page that holds the last of the known tokens, and what its tag is to be."""
        which = (known.length - 1) // self.pool.page_size
        start = which * self.pool.page_size
        return self.page_table.pages[known.req.table_idx][which], Tag(start, known.length - start, known.chain)

    def _check_page(self, known: _Sequence) -> None:
        page, tag = self._tag(known)
        found = self.pool.read(page)
        assert found == tag, f"page {page} of {known.req}, work {known.req.key}, holds {found}, should hold {tag}"
