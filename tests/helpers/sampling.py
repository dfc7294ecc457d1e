"""Requests and logits for tests of the sampler."""

from __future__ import annotations

from typing import Any

import torch

from common.core import Req, SamplingParams
from common.engine.runner import Sampled
from common.engine.sampler import Sampler, SampleRow

VOCAB = 40
EOS = 3


def make_req(params: SamplingParams, *, prompt: list[int] | None = None, output: list[int] | None = None, **fields: Any) -> Req:
    prompt, output = prompt or [1], output or []
    ids = torch.tensor(prompt + output, dtype=torch.int32)
    return Req(ids, 0, 0, 100, 0, params, None, prompt_len=len(prompt), **fields)


def spread_logits(rows: int = 1, *, vocab: int = VOCAB, seed: int = 0, scale: float = 1.5) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def sample_one(logits: torch.Tensor, req: Req, *, completion: int = 0) -> Sampled:
    return Sampler([EOS]).sample(logits, [SampleRow(req, 0, completion)])[0]
