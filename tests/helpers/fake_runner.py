"""FakeRunner: a Runner without a model. The next token is a known function of the whole history, and of the KV that is really
there, so a lost, doubled or stale token or page shows in the output.

With lookahead 1 it is as late as a device may be: a launched step reads and writes KV only when its result is asked for, and the
token it samples is known to the "device" alone until then.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from common.core import Batch, Req
from common.engine.kv_pool import KVPool
from common.engine.page_table import PageTable
from common.engine.peer_store import PeerStore
from common.engine.runner import Pending, Sampled
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


@dataclass
class _Row:
    """What a launch hands to the device for one request, as it was then."""

    req: Req
    row: int
    cached_len: int
    device_len: int
    host_ids: list[int]
    locations: torch.Tensor
    is_last_chunk: bool


@dataclass
class _Flight:
    """A Pending. execute: what the device does, late."""

    execute: Callable[[], list[list[Sampled]]]
    done: list[list[Sampled]] | None = None
    was_read: bool = False

    def result(self) -> list[list[Sampled]]:
        assert not self.was_read, "a step's result was asked for twice"
        self.was_read = True
        return self.execute() if self.done is None else self.done


class FakeRunner:
    """One layer, one head, head_dim 1: K of a token is its id + 1, V its position + 1.

    A step stores those and reads the whole history back from the pages before it answers; a mismatch raises AssertionError naming
    the position.
    """

    default_lookahead: ClassVar[int] = 0
    """Fixture each_lookahead sets it."""

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
        lookahead: int | None = None,
    ) -> None:
        """lookahead: None: default_lookahead."""
        self.lookahead = self.default_lookahead if lookahead is None else lookahead
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
        self._device_ids: dict[int, list[int]] = {}
        """By page table row: the ids that the device knows, one sampled token ahead of the host's."""
        self._in_air = 0

    def run(self, batch: Batch) -> list[list[Sampled]]:
        return self.launch(batch).result()

    def launch(self, batch: Batch, stores: Mapping[Req, PeerStore] | None = None) -> Pending:
        assert not stores
        assert self._in_air <= self.lookahead, f"{self._in_air} steps are in the air already"
        self._before_run(batch)
        batch.padded_reqs = batch.reqs
        self.batches.append([(req.uid, req.extend_len) for req in batch.reqs])
        self.computed_tokens += sum(req.extend_len for req in batch.reqs)
        rows = [self._launch_one(req) for req in batch.reqs]
        self._in_air += 1
        flight = _Flight(lambda: self._execute(rows))
        if self.lookahead == 0:
            flight.done = self._execute(rows)
        return flight

    def _launch_one(self, req: Req) -> _Row:
        assert req.device_len <= req.max_device_len and req.extend_len >= 1, f"{req} has nothing to compute"
        assert req.device_len <= len(req.input_ids) + self.lookahead, f"{req}: the host is too far behind"
        return _Row(
            req,
            req.table_idx,
            req.cached_len,
            req.device_len,
            req.input_ids.tolist(),
            self.page_table.tensor[req.table_idx, : req.device_len].long(),
            req.is_last_chunk,
        )

    def _execute(self, rows: list[_Row]) -> list[list[Sampled]]:
        self._in_air -= 1
        return [self._execute_one(row) for row in rows]

    def _execute_one(self, row: _Row) -> list[Sampled]:
        history = row.host_ids
        if row.device_len > len(history):
            device_ids = self._device_ids[row.row]
            assert device_ids[: len(history)] == history, f"the host's tokens of {row.req} are not the device's"
            assert len(device_ids) == row.device_len, f"{row.req}: the device has {len(device_ids)} tokens"
            history = device_ids
        ids = torch.tensor(history[: row.device_len], dtype=torch.int32)
        fresh = slice(row.cached_len, row.device_len)
        self._write(row.locations[fresh], ids[fresh], torch.arange(row.cached_len, row.device_len))
        keys, values = self._read(row.locations)
        wrong = ((keys != ids + 1) | (values != torch.arange(row.device_len) + 1)).nonzero().flatten().tolist()
        assert not wrong, f"KV of {row.req} is not what was computed, at positions {wrong[:5]}"
        return self._sample(row, history) if row.is_last_chunk else []

    def _sample(self, row: _Row, history: list[int]) -> list[Sampled]:
        req = row.req
        picks = [self._next_token(history, req.completion + i) for i in range(req.n)]
        self._device_ids[row.row] = [*history, picks[0]]
        logprobs = req.logprobs
        return [Sampled(t, None if logprobs is None else -0.5, tuple((t, -0.5) for _ in range(logprobs or 0))) for t in picks]

    def _write(self, locations: torch.Tensor, ids: torch.Tensor, positions: torch.Tensor) -> None:
        page, offset = locations // self.page_table.page_size, locations % self.page_table.page_size
        self.pool.k(0)[page, offset, 0, 0] = (ids + 1).float()
        self.pool.v(0)[page, offset, 0, 0] = (positions + 1).float()

    def _read(self, locations: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        page, offset = locations // self.page_table.page_size, locations % self.page_table.page_size
        return self.pool.k(0)[page, offset, 0, 0], self.pool.v(0)[page, offset, 0, 0]
