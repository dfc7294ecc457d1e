"""FakeRunner: a Runner without a model. The next token is a known function of the whole history, and of the KV that is really
there, so a lost, doubled or stale token or page shows in the output."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import torch

from common.core import Batch, Req
from common.engine.kv_pool import KVPool
from common.engine.page_table import PageTable
from common.engine.runner import Sampled
from common.work import Compatibility

VOCAB = 251
"""Small and prime; token ids below EOS are ordinary."""
EOS = 250


def next_token(history: Sequence[int], completion: int = 0) -> int:
    """What FakeRunner says after history (prompt and output so far), never EOS."""
    return zlib.crc32(bytes(i & 0xFF for i in history) + completion.to_bytes(2, "little")) % EOS


def continuation(prompt: Sequence[int], count: int, completion: int = 0) -> list[int]:
    """The next `count` tokens after prompt."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(next_token(ids, completion))
    return ids[len(prompt) :]


class FakeRunner:
    """One layer, one head, head_dim 1: K of a token is its id + 1, V its position + 1.

    run() stores those and reads the whole history back from the pages before it answers; a mismatch raises AssertionError naming
    the position.
    """

    def __init__(
        self,
        *,
        num_pages: int = 32,
        page_size: int = 4,
        rows: int = 64,
        max_context: int = 128,
        storage: memoryview | None = None,
        next_token: Callable[[Sequence[int], int], int] = next_token,
        before_run: Callable[[Batch], None] = lambda batch: None,
    ) -> None:
        self.compatibility = Compatibility("fake", "float32", page_size, max_context, num_layers=1, num_kv_heads=1, head_dim=1)
        self.eos_token_ids = frozenset({EOS})
        self.page_table = PageTable(rows, max_context, page_size=page_size)
        self.pool = KVPool(
            num_pages=num_pages,
            num_layers=1,
            page_size=page_size,
            num_kv_heads=1,
            head_dim=1,
            dtype=torch.float32,
            device="cpu",
            storage=storage,
        )
        self.computed_tokens = 0
        self.batches: list[list[tuple[int, int]]] = []
        """(uid, extend_len) of every request of every run, for tests about scheduling."""
        self._next_token = next_token
        self._before_run = before_run

    def run(self, batch: Batch) -> list[list[Sampled]]:
        self._before_run(batch)
        batch.padded_reqs = batch.reqs
        self.batches.append([(req.uid, req.extend_len) for req in batch.reqs])
        return [self._run_one(req) for req in batch.reqs]

    def _run_one(self, req: Req) -> list[Sampled]:
        locations = self.page_table.tensor[req.table_idx, : req.device_len].long()
        ids = req.input_ids[: req.device_len]
        fresh = slice(req.cached_len, req.device_len)
        self._write(locations[fresh], ids[fresh], torch.arange(req.cached_len, req.device_len))
        keys, values = self._read(locations)
        wrong = ((keys != ids + 1) | (values != torch.arange(req.device_len) + 1)).nonzero().flatten().tolist()
        assert not wrong, f"KV of {req} is not what was computed, at positions {wrong[:5]}"
        self.computed_tokens += req.extend_len
        if not req.is_last_chunk:
            return []
        history = req.input_ids.tolist()
        picks = [self._next_token(history, req.completion + i) for i in range(req.n)]
        logprobs = req.logprobs
        return [Sampled(t, None if logprobs is None else -0.5, tuple((t, -0.5) for _ in range(logprobs or 0))) for t in picks]

    def _write(self, locations: torch.Tensor, ids: torch.Tensor, positions: torch.Tensor) -> None:
        page, offset = locations // self.page_table.page_size, locations % self.page_table.page_size
        self.pool.k(0)[page, offset, 0, 0] = (ids + 1).float()
        self.pool.v(0)[page, offset, 0, 0] = (positions + 1).float()

    def _read(self, locations: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        page, offset = locations // self.page_table.page_size, locations % self.page_table.page_size
        return self.pool.k(0)[page, offset, 0, 0], self.pool.v(0)[page, offset, 0, 0]
