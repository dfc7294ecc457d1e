"""Drives a Runner without a worker: requests get pages and rows, are prefilled in chunks and decoded together."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from common.core import Batch, Req, SamplingParams, reset_global_ctx
from common.engine.chunks import plan_chunks
from common.engine.config import EngineConfig
from common.engine.model_runner import ModelRunner
from common.engine.pages import pages_for
from common.engine.runner import Pending, Runner, Sampled


@contextmanager
def engine(model: Path, *, pool_tokens: int = 16384, page_size: int = 16, **config: Any) -> Iterator[ModelRunner]:
    """A ModelRunner whose Context is gone afterwards, so that one process can have several after each other.

    One thread: with two, a tiny model waits at barriers for a core that another process has."""
    reset_global_ctx()
    try:
        yield ModelRunner.load(
            EngineConfig(
                model=model,
                pool_pages=pool_tokens // page_size,
                page_size=page_size,
                **({"table_rows": 32, "threads": 1} | config),
            )
        )
    finally:
        reset_global_ctx()


class EngineDriver:
    """Pages are handed out in a random order and never given back before close()."""

    def __init__(self, runner: Runner, *, seed: int = 0) -> None:
        self.runner = runner
        self._free = list(range(runner.pool.num_pages))
        random.Random(seed).shuffle(self._free)
        self.pages: dict[Req, list[int]] = {}
        self.sampled: dict[Req, list[Sampled]] = {}

    def add(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        params: SamplingParams | None = None,
        prefix_of: Req | None = None,
        cached_len: int = 0,
        **fields: Any,
    ) -> Req:
        """A request with row and pages. With prefix_of, its first cached_len tokens (whole pages) lie in that request's pages."""
        page_size, row = self.runner.page_table.page_size, self.runner.page_table.take_row()
        shared = self.pages[prefix_of][: cached_len // page_size] if prefix_of else []
        needed = pages_for(len(prompt) + max_tokens, page_size) - len(shared)
        pages = shared + [self._free.pop() for _ in range(needed)]
        self.runner.page_table.assign(row, 0, pages)
        ids = torch.tensor(prompt, dtype=torch.int32)
        req = Req(ids, row, cached_len, max_tokens, len(self.pages), params or SamplingParams(), None, **fields)
        self.pages[req], self.sampled[req] = pages, []
        return req

    def prefill(self, reqs: Sequence[Req], *, chunk_tokens: int = 4096) -> None:
        """Until each has its first token (of completion 0, if n > 1)."""
        waiting = list(reqs)
        while waiting:
            planned = plan_chunks(waiting, budget_tokens=chunk_tokens)
            for req, tokens in planned:
                req.take_chunk(tokens)
            batch = Batch([req for req, _ in planned], "prefill")
            for req, sampled in zip(batch.reqs, self.runner.run(batch), strict=True):
                if req.is_last_chunk:
                    self._advance(req, sampled)
                    waiting.remove(req)
                else:
                    assert sampled == []
                    req.complete_chunk()

    def decode(self, reqs: Sequence[Req]) -> None:
        """One step for those that may go on."""
        batch = Batch([req for req in reqs if req.can_decode], "decode")
        for req, tokens in zip(batch.reqs, self.runner.run(batch), strict=True):
            self._advance(req, tokens)

    def generate(self, prompts: Sequence[Sequence[int]], *, max_tokens: int, chunk_tokens: int = 4096) -> list[list[int]]:
        """All prompts together, greedily, whatever ends they meet; the output ids of each."""
        reqs = [self.add(prompt, max_tokens=max_tokens) for prompt in prompts]
        self.finish(reqs, chunk_tokens=chunk_tokens)
        outputs = [self.output(req) for req in reqs]
        self.close()
        return outputs

    def finish(self, reqs: Sequence[Req], *, chunk_tokens: int = 4096) -> None:
        self.prefill(reqs, chunk_tokens=chunk_tokens)
        self.decode_all(reqs)

    def decode_all(self, reqs: Sequence[Req], *, ahead: bool = False) -> None:
        """Until nobody may go on. ahead: each step is launched before the tokens of the one before it are read."""
        in_air: deque[tuple[list[Req], Pending]] = deque()
        while batch := [req for req in reqs if req.can_decode]:
            in_air.append((batch, self.runner.launch(Batch(list(batch), "decode"))))
            for req in batch:
                req.complete_one()
            if len(in_air) > ahead:
                self._land(*in_air.popleft())
        for flight in in_air:
            self._land(*flight)

    def _land(self, reqs: list[Req], pending: Pending) -> None:
        for req, tokens in zip(reqs, pending.result(), strict=True):
            self.sampled[req] += tokens
            req.append_host(torch.tensor([tokens[0].token_id], dtype=torch.int32))

    def output(self, req: Req) -> list[int]:
        ids: list[int] = req.input_ids[req.prompt_len :].tolist()
        return ids

    def close(self) -> None:
        """Gives every row and page back."""
        for req, pages in self.pages.items():
            self.runner.page_table.release_row(req.table_idx)
            self._free = list(dict.fromkeys(self._free + pages))
        self.pages, self.sampled = {}, {}

    def _advance(self, req: Req, tokens: list[Sampled]) -> None:
        assert len(tokens) == req.n
        self.sampled[req] += tokens
        req.complete_one()
        req.append_host(torch.tensor([tokens[0].token_id], dtype=torch.int32))
