"""TorchAttention against a plain loop, and how it groups a batch."""

from __future__ import annotations

import random

import pytest
import torch

from common.core import Batch, Context, Req, SamplingParams
from common.engine.attention import TorchAttention, split_by_length
from common.engine.kv_pool import KVPool
from common.engine.page_table import PageTable
from common.engine.pages import pages_for
from common.engine.rotary import AttentionHeads, RotaryEmbedding

LAYERS = 2
HEAD_DIM = 8
EPS = 1e-5
THETA = 10000.0


class Stand:
    """An attention backend, a pool with random contents and requests in it."""

    def __init__(self, *, heads: int, kv_heads: int, page_size: int) -> None:
        self.heads, self.kv_heads = heads, kv_heads
        num_pages = 600 // page_size
        self.ctx = Context(page_size=page_size)
        table = PageTable(16, 100, page_size=page_size)
        self.pool = KVPool(
            num_pages, num_layers=LAYERS, page_size=page_size, num_kv_heads=kv_heads, head_dim=HEAD_DIM, dtype=torch.float32
        )
        self.pool.tensor.normal_(generator=torch.Generator().manual_seed(1))
        self.ctx.page_table, self.ctx.kv_cache = table.tensor, self.pool
        self.table = table
        self.backend = TorchAttention(self.ctx, num_heads=heads, num_kv_heads=kv_heads, head_dim=HEAD_DIM, dtype=torch.float32)
        self.free = list(range(num_pages))
        random.Random(3).shuffle(self.free)

    def req(self, cached_len: int, device_len: int) -> Req:
        row = self.table.take_row()
        pages = [self.free.pop() for _ in range(pages_for(device_len, self.table.page_size))]
        self.table.assign(row, 0, pages)
        return Req(torch.zeros(device_len, dtype=torch.int32), row, cached_len, 5, row, SamplingParams(), None)

    def attention_heads(self, qk_norm: bool) -> AttentionHeads:
        norms = torch.rand(2, HEAD_DIM) + 0.5
        return AttentionHeads(
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=HEAD_DIM,
            q_norm=norms[0] if qk_norm else None,
            k_norm=norms[1] if qk_norm else None,
            eps=EPS,
            rotary=RotaryEmbedding(HEAD_DIM, theta=THETA, scaling=None, max_context=100, dtype=torch.float32, device="cpu"),
        )

    def normed_and_rotated(self, x: torch.Tensor, norm: torch.Tensor | None, positions: torch.Tensor) -> torch.Tensor:
        """x: [tokens, heads, HEAD_DIM], by the formulas in float64."""
        x = x.double()
        if norm is not None:
            x = x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * norm.double()
        pairs = torch.complex(x[..., : HEAD_DIM // 2], x[..., HEAD_DIM // 2 :])
        angles = positions[:, None, None] * THETA ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM).double()
        pairs = pairs * torch.polar(torch.ones_like(angles), angles)
        return torch.cat([pairs.real, pairs.imag], dim=-1).float()

    def check(self, spans: list[tuple[int, int]], *, qk_norm: bool = False) -> None:
        """Attends a batch of requests with these (cached_len, device_len) in one layer and compares every token."""
        reqs = [self.req(*span) for span in spans]
        batch = Batch(reqs, "prefill")
        batch.padded_reqs = reqs
        table = self.ctx.page_table
        batch.out_loc = torch.cat([table[req.table_idx, req.cached_len : req.device_len] for req in reqs]).long()
        total = len(batch.out_loc)
        self.backend.prepare_metadata(batch)
        batch.positions = torch.cat([torch.arange(req.cached_len, req.device_len) for req in reqs])
        heads = self.attention_heads(qk_norm)
        qkv = torch.randn(total, (self.heads + 2 * self.kv_heads) * HEAD_DIM)
        q, k, v = torch.split(qkv.view(total, -1, HEAD_DIM), [self.heads, self.kv_heads, self.kv_heads], dim=1)
        q, k = (self.normed_and_rotated(x, norm, batch.positions) for x, norm in ((q, heads.q_norm), (k, heads.k_norm)))
        out = self.backend.forward(qkv, heads, 1, batch).view(total, self.heads, HEAD_DIM)
        token = 0
        for req in reqs:
            for position in range(req.cached_len, req.device_len):
                locations = table[req.table_idx, : position + 1].long()
                keys = self.pool.k(1).reshape(-1, self.kv_heads, HEAD_DIM)[locations]
                values = self.pool.v(1).reshape(-1, self.kv_heads, HEAD_DIM)[locations]
                torch.testing.assert_close(out[token], attend(q[token], keys, values), rtol=1e-4, atol=1e-5)
                torch.testing.assert_close(keys[-1], k[token])
                assert torch.equal(values[-1], v[token])
                token += 1
        last = [sum(req.extend_len for req in reqs[: i + 1]) - 1 for i in range(len(reqs))]
        logit_rows = batch.attn_metadata.logit_rows
        assert (list(range(total)) if logit_rows is None else logit_rows.tolist()) == last


def attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """q: [heads, head_dim]; keys, values: [length, kv_heads, head_dim] -> [heads, head_dim], in float64."""
    group = q.shape[0] // keys.shape[1]
    rows = []
    for head in range(q.shape[0]):
        weights = (keys[:, head // group].double() @ q[head].double() / HEAD_DIM**0.5).softmax(0)
        rows.append(weights @ values[:, head // group].double())
    return torch.stack(rows).float()


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 3), (6, 1)])
@pytest.mark.parametrize(
    "spans",
    [
        [(0, 1)],
        [(0, 9)],
        [(8, 9)],
        [(5, 12)],
        [(16, 20)],
        [(31, 32), (3, 4), (15, 16), (16, 17)],
        [(20, 21), (20, 21)],
        [(0, 5), (0, 1), (7, 8), (4, 11), (0, 17), (2, 3), (60, 61)],
        [(99, 100), (0, 1)],
    ],
    ids=str,
)
def test_every_token_attends_to_its_request_up_to_itself(
    page_size: int, heads: int, kv_heads: int, spans: list[tuple[int, int]]
) -> None:
    torch.manual_seed(0)
    Stand(heads=heads, kv_heads=kv_heads, page_size=page_size).check(spans)


def test_heads_are_normed_before_they_are_rotated() -> None:
    torch.manual_seed(0)
    Stand(heads=4, kv_heads=2, page_size=4).check([(0, 9), (8, 9), (31, 32), (5, 12)], qk_norm=True)


def test_logits_are_wanted_only_of_requests_whose_last_token_is_computed() -> None:
    stand = Stand(heads=2, kv_heads=1, page_size=4)
    whole, cut = stand.req(0, 6), stand.req(0, 9)
    cut.take_chunk(3)
    for reqs, rows in (([whole, cut], [5]), ([cut], []), ([cut, whole], [8])):
        batch = Batch(reqs, "prefill")
        batch.padded_reqs = reqs
        batch.out_loc = torch.zeros(sum(req.extend_len for req in reqs), dtype=torch.int64)
        stand.backend.prepare_metadata(batch)
        assert batch.attn_metadata.logit_rows is not None
        assert batch.attn_metadata.logit_rows.tolist() == rows


@pytest.mark.parametrize(
    ("lengths", "sizes"),
    [
        ([], []),
        ([5], [1]),
        ([5, 5, 5], [3]),
        ([100, 1, 1, 1], [1, 3]),
        ([1, 1, 1, 100], [3, 1]),
        ([60, 60], [1, 1]),
        ([1000], [1]),
    ],
)
def test_groups_pad_little_and_stay_small(lengths: list[int], sizes: list[int]) -> None:
    assert split_by_length(lengths, max_tokens=100) == sizes


def test_every_request_is_in_one_group_and_padding_is_at_most_a_half() -> None:
    generator = random.Random(0)
    for _ in range(200):
        lengths = [generator.randint(1, 500) for _ in range(generator.randint(1, 40))]
        sizes = split_by_length(lengths, max_tokens=1000)
        assert sum(sizes) == len(lengths) and min(sizes) > 0
        for size in sizes:
            group, lengths = lengths[:size], lengths[size:]
            assert size == 1 or max(group) * size <= min(1000, 1.5 * sum(group))
