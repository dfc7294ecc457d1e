"""What the sampler draws against a plain float64 reference."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from common.core import Req, SamplingParams
from common.engine.sampler import Sampler, SampleRow
from tests.helpers.sampling import EOS, VOCAB, make_req, sample_one, spread_logits

DRAWS = 4000


def reference_distribution(logits: torch.Tensor, req: Req) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Token probabilities, the slow and obvious way."""
    values = logits.double().numpy().copy()
    params, ids = req.sampling_params, req.input_ids.tolist()
    output = Counter(ids[req.prompt_len :])
    for token in range(len(values)):
        if token in ids:
            values[token] *= params.repetition_penalty if values[token] < 0 else 1 / params.repetition_penalty
        if output[token]:
            values[token] -= output[token] * params.frequency_penalty + params.presence_penalty
        values[token] += params.logit_bias.get(token, 0.0)
        if req.num_output < params.min_tokens and (token == EOS or token in params.stop_token_ids):
            values[token] = -math.inf
    if params.temperature <= 0 or params.top_k == 1:
        probabilities = np.zeros(len(values))
        probabilities[values.argmax()] = 1
        return probabilities
    values /= params.temperature
    probabilities = np.exp(values - values.max())
    order = np.argsort(-probabilities, kind="stable")
    if params.top_k > 0:
        probabilities[order[params.top_k :]] = 0
    probabilities /= probabilities.sum()
    if params.top_p < 1:
        before = np.cumsum(probabilities[order]) - probabilities[order]
        probabilities[order[before >= params.top_p]] = 0
    probabilities[probabilities < params.min_p * probabilities.max()] = 0
    result: np.ndarray[Any, np.dtype[np.float64]] = probabilities / probabilities.sum()
    return result


PARAMS = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.5),
    SamplingParams(temperature=2.0, top_k=5),
    SamplingParams(temperature=1.5, top_p=0.7),
    SamplingParams(temperature=1.5, min_p=0.1),
    SamplingParams(temperature=2.0, top_k=20, top_p=0.8, min_p=0.05),
    SamplingParams(temperature=1.0, top_k=VOCAB),
    SamplingParams(temperature=1.0, top_k=2**31 - 1),
    SamplingParams(temperature=1.0, repetition_penalty=1.7),
    SamplingParams(temperature=1.0, frequency_penalty=0.8, presence_penalty=0.5),
    SamplingParams(temperature=1.0, frequency_penalty=-0.5, presence_penalty=-0.5, repetition_penalty=0.8),
    SamplingParams(temperature=1.0, logit_bias={4: 3.0, 9: -5.0, 20: 1.0}),
    SamplingParams(temperature=1.0, min_tokens=10, stop_token_ids=(5, 6), logit_bias={EOS: 10.0}),
    SamplingParams(temperature=1.3, top_k=12, top_p=0.9, min_p=0.02, repetition_penalty=1.2, logit_bias={2: 2.0}),
]


@pytest.mark.parametrize("params", PARAMS, ids=range(len(PARAMS)))
def test_draws_follow_the_reference_distribution_hnd_13(params: SamplingParams) -> None:
    params.seed = 99
    req = make_req(params, prompt=[1, 2, 2, 7], output=[4, 4, 4, 8])
    logits = spread_logits()
    expected = reference_distribution(logits[0], req)
    drawn = Sampler([EOS]).sample(logits, [SampleRow(req, 0, i) for i in range(DRAWS)])
    counts = np.bincount([sampled.token_id for sampled in drawn], minlength=VOCAB)
    assert not counts[expected == 0].any(), "a token that the filters exclude was drawn"
    assert_fits(counts, expected * DRAWS)


def assert_fits(counts: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> None:
    """Pearson's chi-square with rare tokens pooled; its p-value by Wilson and Hilferty's normal approximation, p > 1e-4."""
    rare = expected < 8
    counts, expected = (np.append(x[~rare], x[rare].sum()) for x in (counts, expected))
    counts, expected = counts[expected > 0], expected[expected > 0]
    degrees = max(1, len(expected) - 1)
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    deviation = ((chi_square / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / math.sqrt(2 / (9 * degrees))
    assert deviation < 3.72, f"chi-square {chi_square:.1f} with {degrees} degrees of freedom"


@pytest.mark.parametrize("params", PARAMS, ids=range(len(PARAMS)))
def test_the_most_likely_token_is_the_reference_s_at_temperature_0(params: SamplingParams) -> None:
    greedy = SamplingParams(**{**vars(params), "temperature": 0.0})
    for seed in range(20):
        logits = spread_logits(seed=seed)
        req = make_req(greedy, prompt=[1, 2, 2, 7], output=[4, 4, 4, 8])
        assert sample_one(logits, req).token_id == reference_distribution(logits[0], req).argmax()
