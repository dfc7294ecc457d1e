"""A device sampler beside the CPU's, for tests. Without a GPU Triton's interpreter runs the kernels, if TRITON_INTERPRET is 1."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from common.core import Req, SamplingParams
from common.engine.philox import uniforms
from common.engine.runner import Sampled
from common.engine.sampler import Sampler, SampleRow, best_ids, nucleus_ids
from tests.helpers.sampling import EOS

pytest.importorskip("triton", reason="the device sampler needs triton")

if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("no GPU, and TRITON_INTERPRET=1 is not set", allow_module_level=True)

from common.engine.cuda.sampling import DeviceSampler, Level, level_of
from common.engine.cuda.sampling_state import SamplingState

__all__ = ["DeviceSampler", "Level", "level_of"]

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
VOCAB = 20_000 if CUDA else 600
"""Several chunks, the last one not full."""
ROWS = 64 if CUDA else 8
BATCHES = 200 if CUDA else 2
ROUNDING = 2e-5
"""Of sums of VOCAB float32 weights, relative to their total: several times what summing in another order makes."""


class Rig:
    """A sampler with ROWS slots and a dummy; request i sits in slot `slots[i]`, i unless given."""

    def __init__(self, *, vocab: int = VOCAB, rows: int = ROWS, **options: Any) -> None:
        self.state = SamplingState(rows + 1, vocab, [EOS], DEVICE)
        small: dict[str, Any] = {} if CUDA else {"chunk": 256, "block": 64}
        self.sampler = DeviceSampler(self.state, rows, **small | options)

    def load(self, reqs: Sequence[Req], slots: Sequence[int] | None = None) -> None:
        for slot, req in zip(slots or range(len(reqs)), reqs, strict=False):
            self.state.load(slot, req, req.completion)
        self.state.flush()

    def step(
        self, logits: torch.Tensor, reqs: Sequence[Req], slots: Sequence[int] | None = None, *, level: Level | None = None
    ) -> list[Sampled]:  # fmt: skip
        """Samples, without advancing. level: the cheapest unless given."""
        level = level_of(reqs) if level is None else level
        self.sampler.sample(logits.to(DEVICE), self.slots(slots or range(len(reqs))), level)
        return self.sampler.to_sampled(self.sampler.results(len(reqs), level).cpu().numpy(), reqs)

    def sample(
        self, logits: torch.Tensor, reqs: Sequence[Req], slots: Sequence[int] | None = None, *, level: Level | None = None
    ) -> list[Sampled]:  # fmt: skip
        self.load(reqs, slots)
        return self.step(logits, reqs, slots, level=level)

    def slots(self, slots: Sequence[int]) -> torch.Tensor:
        return torch.tensor(list(slots), dtype=torch.int32, device=DEVICE)


def on_cpu(logits: torch.Tensor, reqs: Sequence[Req]) -> list[Sampled]:
    rows = [SampleRow(req, i, req.completion) for i, req in enumerate(reqs)]
    return Sampler([EOS]).sample(logits, rows)


def tokens(sampled: Sequence[Sampled]) -> list[int]:
    return [one.token_id for one in sampled]


def could_draw(token: int, logits: torch.Tensor, req: Req) -> bool:
    """Whether sums that are off by no more than ROUNDING make this the request's draw: its uniform number is so near to the
    token's part of the cumulative distribution, whose nucleus may be that of a top_p so near to the one asked for.
    logits: processed."""
    params = req.sampling_params
    assert params.seed is not None
    uniform = float(uniforms([(params.seed, req.completion, req.num_output)])[0])
    for top_p in {params.top_p, max(params.top_p - ROUNDING, 0.0), min(params.top_p + ROUNDING, 1.0)}:
        kept = kept_weights(logits, replace(params, top_p=top_p))
        cumulative = kept.cumsum() / kept.sum()
        begin = cumulative[token - 1] if token > 0 else 0.0
        if kept[token] > 0 and begin - ROUNDING <= uniform <= cumulative[token] + ROUNDING:
            return True
    return False


def kept_weights(logits: torch.Tensor, params: SamplingParams) -> np.ndarray:
    """[vocab] float64: 0 where a filter drops the token."""
    values = logits.double()
    weights = ((values - values.max()) / params.temperature).exp().float()
    if 0 < params.top_k < len(weights):
        weights = keep(weights, best_ids(weights, params.top_k))
    if params.top_p < 1.0:
        weights = keep(weights, nucleus_ids(weights, params.top_p))
    result: np.ndarray = weights.masked_fill(weights < params.min_p, 0.0).double().numpy()
    return result


def keep(weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    kept = torch.zeros_like(weights)
    kept[ids] = weights[ids]
    return kept
