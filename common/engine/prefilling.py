"""Prefilling: launches chunks of prompts, and passes on what lands. Both workers prefill by it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Generic, TypeVar

from common.core import Batch, Req
from common.engine.chunks import plan_chunks
from common.engine.flights import Flights
from common.engine.peer_store import PeerStore
from common.engine.prompt import Prompt
from common.engine.runner import Runner, Sampled

P = TypeVar("P", bound=Prompt)


class Prefilling(Generic[P]):
    """Engine thread only."""

    def __init__(
        self,
        runner: Runner,
        *,
        flights: Flights,
        chunk_tokens: int,
        on_start: Callable[[P], None],
        on_landed: Callable[[P, list[Sampled]], None],
        on_dropped: Callable[[P], None] = lambda prompt: None,
        stores: Callable[[Sequence[P]], Mapping[Req, PeerStore]] = lambda prompts: {},
    ) -> None:
        """chunk_tokens: budget of one step, over all prompts. on_start: the prompt's first chunk is about to be launched.
        on_landed: one of its chunks has landed, and it is not broken; with what was sampled, if that was its last.
        on_dropped: it is broken, and nothing of it is in the air any more.
        stores: what of these prompts' KV the step is to store in a peer's pool too."""
        self._runner = runner
        self._flights = flights
        self._chunk_tokens = chunk_tokens
        self._on_start = on_start
        self._on_landed = on_landed
        self._on_dropped = on_dropped
        self._stores = stores
        self.computed_tokens = 0
        """Launched since the start."""

    def launch(self, prompts: Sequence[P]) -> bool:
        """Launches chunks of those prompts (in order of arrival) that have any left; False if none has."""
        by_req = {prompt.req: prompt for prompt in prompts if prompt.remaining > 0}
        plan = plan_chunks(list(by_req), budget_tokens=self._chunk_tokens)
        if not plan:
            return False
        for req, tokens in plan:
            req.take_chunk(tokens)
            self._start(by_req[req])
            self.computed_tokens += tokens
        chunks = [by_req[req] for req, _ in plan]
        pending = self._runner.launch(Batch([req for req, _ in plan], "prefill"), self._stores(chunks))
        ends = [req.device_len for req, _ in plan]
        for prompt in chunks:
            prompt.in_flight += 1
            if prompt.req.is_last_chunk:
                prompt.req.complete_one()
            else:
                prompt.req.complete_chunk()
        self._flights.add(pending, partial(self._land, chunks, ends))
        return True

    def _start(self, prompt: P) -> None:
        if not prompt.has_started:
            prompt.has_started = True
            prompt.cached_tokens = prompt.req.cached_len
            self._on_start(prompt)

    def _land(self, chunks: list[P], ends: list[int], results: list[list[Sampled]]) -> None:
        for prompt, end, sampled in zip(chunks, ends, results, strict=True):
            prompt.in_flight -= 1
            prompt.computed_len = end
            if not prompt.is_broken:
                self._on_landed(prompt, sampled)
            elif prompt.in_flight == 0:
                self._on_dropped(prompt)
