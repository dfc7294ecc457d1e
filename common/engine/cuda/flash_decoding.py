"""FlashDecoding: decode attention by our own kernel, which overlaps with the kernels before and after it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from common.engine.cuda.attention_kernels import Geometry, Unplanned
from common.engine.cuda.jit.decode_attention import decode_attention_kernel
from common.engine.cuda.launch import INTERPRETED, is_power_of_2, launch_options, power_of_2_from

MIN_ROWS = 16
"""The tensor cores take no fewer."""
MAX_TILE = 32 << 10
"""Values of one head in a page, at most: K's and V's are in shared memory together, 140 to 150 KB of the 227 of an H200's SM."""
MAX_SPLIT = 32
PLACES = 1024
"""Parts of sequences that may meet in the workspace."""
LEAST_TOKENS = ((32, 128), (128, 256), (256, 512), (math.inf, 2048))
"""Up to so many pairs of a request and a KV head, the least tokens of a part."""


@dataclass(frozen=True)
class Plan:
    """How a step's attention is cut up. split: parts of a sequence at most, of least_pages each. stages: pages on their way
    through shared memory. ahead: pages a program sends for, to L2, before the kernel before this one has ended."""

    split: int
    least_pages: int
    stages: int
    warps: int
    ahead: int


def choose(requests: int, num_kv_heads: int, page_size: int) -> Plan:
    """What was measured best on an H200 (docs/performance.md): parts enough to keep its SMs busy, long enough to be worth adding
    up; the more requests, the longer."""
    pairs = requests * num_kv_heads
    least_tokens = next(tokens for most, tokens in LEAST_TOKENS if pairs <= most)
    return Plan(max(1, min(MAX_SPLIT, PLACES // pairs)), max(1, least_tokens // page_size), stages=3, warps=4, ahead=1)


def obstacle(geometry: Geometry) -> str:
    """Why this kernel does not serve this geometry; empty if it does."""
    page_size, head_dim = geometry.page_size, geometry.head_dim
    are_powers = is_power_of_2(page_size) and is_power_of_2(head_dim)
    if are_powers and page_size >= 16 and 64 <= head_dim <= 256 and page_size * head_dim <= MAX_TILE:
        return ""
    return f"does not serve pages of {page_size} tokens with head_dim {head_dim}"


class FlashDecoding(Unplanned):
    """A DecodeKernel. One for all steps of a stream, which leave its workspace as they found it."""

    def __init__(self, geometry: Geometry) -> None:
        self._group, self._num_kv_heads = geometry.group, geometry.num_kv_heads
        self._scale = geometry.head_dim**-0.5 * math.log2(math.e)
        floats = PLACES * geometry.group * (geometry.head_dim + 2)
        self._partial = torch.empty(floats, dtype=torch.float32, device=geometry.device)
        self._counters = torch.zeros(PLACES, dtype=torch.int32, device=geometry.device)

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        out: torch.Tensor,
        *,
        plan: Plan | None = None,
    ) -> None:
        """plan: choose()'s unless given; split * requests * num_kv_heads <= PLACES, or split is 1."""
        plan = plan or choose(len(q), self._num_kv_heads, k.shape[1])
        programs = len(q) * self._num_kv_heads * plan.split
        assert plan.split == 1 or programs <= PLACES
        assert k.stride() == v.stride() and k.stride(2) == k.shape[3] and q.stride(1) == out.stride(1) == q.shape[2]
        decode_attention_kernel[(programs,)](
            q, k, v, block_tables, seq_lens, out, self._partial, self._counters,
            q.stride(0), k.stride(0), k.stride(1), block_tables.stride(0), out.stride(0), self._scale,
            plan.split, plan.least_pages,
            GROUP=self._group, ROWS=max(MIN_ROWS, power_of_2_from(self._group)), HKV=self._num_kv_heads, D=q.shape[2],
            PAGE_SIZE=k.shape[1], IS_SPLIT=plan.split > 1, AHEAD=0 if INTERPRETED else plan.ahead,
            STAGES=plan.stages, **launch_options(plan.warps, pdl=None),
        )  # fmt: skip
