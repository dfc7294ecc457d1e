"""Sampler: from logits to tokens, each row by its own request's parameters and random stream, whatever else is in the batch.

Order: penalties and bias, (a grammar's mask,) temperature, top_k, top_p, min_p, draw. The draw is the inverse of the cumulative
distribution, in the order of token ids, at one uniform number: if the logits change a little, so do the boundaries.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
import torch

from common.core import Req, SamplingParams
from common.engine.philox import uniforms
from common.engine.runner import Sampled

MIN_TEMPERATURE = 1e-20
"""Below it all is greedy anyhow, and a float32 division would turn 0 / temperature into NaN."""


class SampleRow(NamedTuple):
    """A token to sample. logits: the row of the logits tensor; completion: which random stream of the request's seed."""

    req: Req
    logits: int
    completion: int


class Sampler:
    """Stateless but for the end tokens, which min_tokens masks."""

    def __init__(self, eos_token_ids: Collection[int]) -> None:
        self._eos_token_ids = sorted(eos_token_ids)

    def sample(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[Sampled]:
        """logits: [requests, vocab_size], any float dtype, left as they are. One result per row."""
        if not rows:
            return []
        best: list[int] | None = None
        tokens = []
        uniform = iter(_uniforms([row for row in rows if not is_deterministic(row.req.sampling_params)]))
        for row in rows:
            params = row.req.sampling_params
            if self._has_processors(row.req):
                processed = self._processed(logits[row.logits], row.req)
                tokens.append(int(processed.argmax()) if is_deterministic(params) else draw(processed, params, next(uniform)))
            elif is_deterministic(params):
                # Not argmax, which takes six times as long in bfloat16; both give the first of equals.
                best = logits.max(dim=-1).indices.tolist() if best is None else best
                tokens.append(best[row.logits])
            else:
                tokens.append(draw(logits[row.logits].to(torch.float32, copy=True), params, next(uniform)))
        return [_with_logprobs(logits, row, token) for row, token in zip(rows, tokens, strict=True)]

    def _has_processors(self, req: Req) -> bool:
        params = req.sampling_params
        return params.has_penalties or bool(params.logit_bias) or bool(self._masked_ids(req))

    def _masked_ids(self, req: Req) -> list[int]:
        """The tokens that would end the output, while it is shorter than min_tokens."""
        params = req.sampling_params
        if req.num_output >= params.min_tokens:
            return []
        return [*params.stop_token_ids, *(() if params.ignore_eos else self._eos_token_ids)]

    def _processed(self, logits: torch.Tensor, req: Req) -> torch.Tensor:
        """[vocab_size] float32, a copy: everything that happens to logits before they are a distribution."""
        logits = logits.to(torch.float32, copy=True)
        params = req.sampling_params
        if params.has_penalties:
            apply_penalties(logits, params, prompt=req.input_ids[: req.prompt_len], output=req.input_ids[req.prompt_len :])
        if params.logit_bias:
            ids = torch.tensor(list(params.logit_bias), device=logits.device)
            logits[ids] += torch.tensor(list(params.logit_bias.values()), device=logits.device)
        # A grammar's mask belongs here: after the bias, which must not bring back what it forbids.
        if masked := self._masked_ids(req):
            logits[masked] = float("-inf")
        return logits


def is_deterministic(params: SamplingParams) -> bool:
    """The most likely token is chosen. More than is_greedy: at temperature 0 every filter keeps that token, whatever it drops."""
    return params.temperature <= 0.0 or params.top_k == 1


def apply_penalties(logits: torch.Tensor, params: SamplingParams, *, prompt: torch.Tensor, output: torch.Tensor) -> None:
    """In place. logits: [vocab_size] float32; prompt, output: token ids. Repetition is over both, once per token however often it
    occurred; frequency (per occurrence) and presence (once) are over the output only."""
    if params.repetition_penalty != 1.0:
        seen = torch.cat([prompt, output]).bincount().nonzero().flatten().to(logits.device)
        values = logits[seen]
        logits[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if len(output) and (params.frequency_penalty or params.presence_penalty):
        counts = output.bincount().to(logits.device)
        ids = counts.nonzero().flatten()
        logits[ids] -= counts[ids] * params.frequency_penalty + params.presence_penalty


def draw(logits: torch.Tensor, params: SamplingParams, uniform: float) -> int:
    """The token at `uniform` (in (0, 1)) of the filtered distribution. logits: [vocab_size] float32, processed; overwritten."""
    # Probabilities up to a factor; the best token's is 1, so nothing overflows at any temperature.
    weights = logits.sub_(logits.max()).div_(max(params.temperature, MIN_TEMPERATURE)).exp_()
    ids: torch.Tensor | None = None
    if 0 < params.top_k < len(weights):
        ids = best_ids(weights, params.top_k)
        weights = weights[ids]
    if params.top_p < 1.0:
        kept = nucleus_ids(weights, params.top_p)
        weights, ids = weights[kept], kept if ids is None else ids[kept]
    if params.min_p > 0.0:
        weights = weights.masked_fill(weights < params.min_p, 0.0)
    cumulative = weights.cumsum(dim=0, dtype=torch.float64)
    # The first token whose cumulative weight is above the target: never one of weight 0.
    index = int(torch.searchsorted(cumulative, cumulative[-1:] * uniform, right=True))
    return index if ids is None else int(ids[index])


def best_ids(values: torch.Tensor, count: int) -> torch.Tensor:
    """The indices of the count largest values, ascending; of equal values the first ones. values: [n]; 1 <= count <= n."""
    return _ids_down_to(values.topk(count, sorted=False).values.min(), values, count)


def nucleus_ids(weights: torch.Tensor, top_p: float) -> torch.Tensor:
    """The indices of the fewest largest weights that reach top_p of their sum, ascending. weights: [n], not negative."""
    # numpy sorts 49152 floats in 0.1 ms on one core, torch in 3 ms.
    descending = np.sort(weights.cpu().numpy())[::-1]
    cumulative = descending.cumsum(dtype=np.float64)
    count = min(int(np.searchsorted(cumulative, top_p * cumulative[-1])) + 1, len(cumulative))
    return _ids_down_to(weights.new_tensor(descending[count - 1]), weights, count)


def _ids_down_to(smallest: torch.Tensor, values: torch.Tensor, count: int) -> torch.Tensor:
    """smallest: the count-th largest of values."""
    ids = (values >= smallest).nonzero().flatten()
    if len(ids) == count:
        return ids
    ties = values[ids] == smallest
    return ids[~ties | (ties.cumsum(dim=0) <= count - (len(ids) - ties.sum()))]


def _uniforms(rows: Sequence[SampleRow]) -> list[float]:
    draws = []
    for row in rows:
        seed = row.req.sampling_params.seed
        assert seed is not None, "the router draws a seed where none is given"
        draws.append((seed, row.completion, row.req.num_output))
    return uniforms(draws) if draws else []


def _with_logprobs(logits: torch.Tensor, row: SampleRow, token: int) -> Sampled:
    count = row.req.logprobs
    if count is None:
        return Sampled(token)
    values = logits[row.logits].float().log_softmax(dim=-1)
    if count == 0:
        return Sampled(token, float(values[token]))
    ids = best_ids(values, min(count, len(values)))
    order = values[ids].sort(descending=True, stable=True)
    top = tuple(zip(ids[order.indices].tolist(), order.values.tolist(), strict=True))
    return Sampled(token, float(values[token]), top)
