"""The sampler's promises at the edges; what it draws on the whole is in test_engine_sampler_distribution.py."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from common.core import Req, SamplingParams
from common.engine.runner import Sampled
from common.engine.sampler import Sampler, SampleRow, best_ids, nucleus_ids
from tests.helpers.sampling import EOS, VOCAB, make_req, sample_one, spread_logits


@pytest.mark.parametrize("top_p", [0.1, 0.9, 1.0])
@pytest.mark.parametrize("top_k", [-1, 1, 50])
@pytest.mark.parametrize("seed", [None, 5])
def test_temperature_0_is_greedy_with_any_filter_smp_10(top_p: float, top_k: int, seed: int | None) -> None:
    logits = spread_logits(vocab=1000)
    params = SamplingParams(temperature=0.0, top_p=top_p, top_k=top_k, seed=seed)
    assert sample_one(logits, make_req(params)).token_id == int(logits.argmax())


@pytest.mark.parametrize("temperature", [1e-4, 1e-5, 1e-8, 1e-30, 1.4e-45])
@pytest.mark.parametrize("top_p", [0.5, 1.0])
def test_tiny_temperatures_are_greedy_smp_02(temperature: float, top_p: float) -> None:
    logits = spread_logits(vocab=1000, scale=20)
    for completion in range(20):
        req = make_req(SamplingParams(temperature=temperature, top_p=top_p, seed=1))
        assert sample_one(logits, req, completion=completion).token_id == int(logits.argmax())


def test_huge_logits_and_temperatures_never_make_nan() -> None:
    for scale in (1e-30, 1.0, 1e4, 1e37):
        for temperature in (1e-8, 1.0, 100.0):
            filters: dict[str, Any]
            for filters in ({}, {"top_p": 1e-6}, {"top_k": 3}, {"min_p": 1.0}, {"top_p": 0.999999, "min_p": 1e-9}):
                params = SamplingParams(temperature=temperature, seed=3, **filters)
                sampled = sample_one(spread_logits(scale=scale), make_req(params, logprobs=5))
                assert 0 <= sampled.token_id < VOCAB
                assert sampled.logprob is not None and not math.isnan(sampled.logprob)


@pytest.mark.parametrize("top_k", [-1, 0, 1, VOCAB, VOCAB + 1, 2**31 - 1])
def test_top_k_off_one_and_above_the_vocabulary_in_one_batch_with_greedy_smp_05(top_k: int) -> None:
    logits = spread_logits(2)
    off = make_req(SamplingParams(temperature=1.0, seed=4))
    reqs = [make_req(SamplingParams(temperature=1.0, seed=4, top_k=top_k)), make_req(SamplingParams())]
    sampled = Sampler([EOS]).sample(logits, [SampleRow(reqs[0], 0, 0), SampleRow(reqs[1], 1, 0)])
    assert sampled[0].token_id == (int(logits[0].argmax()) if top_k == 1 else sample_one(logits, off).token_id)
    assert sampled[1].token_id == int(logits[1].argmax())


def test_a_sample_does_not_depend_on_its_neighbours_smp_01() -> None:
    logits = spread_logits(9, vocab=1000)
    params = SamplingParams(temperature=0.8, seed=42)
    alone = [sample_one(logits, make_req(params, output=[0] * i)) for i in range(32)]
    for neighbour in (
        SamplingParams(temperature=1.0, seed=7),
        SamplingParams(),
        SamplingParams(temperature=1.0, seed=42, top_k=3),
    ):
        for i in range(32):
            rows = [SampleRow(make_req(neighbour), row, 0) for row in range(1, 9)]
            rows.insert(i % 9, SampleRow(make_req(params, output=[0] * i), 0, 0))
            assert Sampler([EOS]).sample(logits, rows)[i % 9] == alone[i]
    assert len({sampled.token_id for sampled in alone}) > 10


def test_seed_completion_and_output_index_each_change_the_draw() -> None:
    logits = torch.zeros(1, 10_000)

    def draw(seed: int, completion: int, index: int) -> int:
        params = SamplingParams(temperature=1.0, seed=seed)
        return sample_one(logits, make_req(params, output=[0] * index), completion=completion).token_id

    base = draw(1, 0, 0)
    assert base == draw(1, 0, 0)
    others = [draw(2, 0, 0), draw(1, 1, 0), draw(1, 0, 1), draw(2**63 + 1, 0, 0)]
    assert len({base, *others}) == 5


def test_a_continuation_draws_what_the_first_attempt_would_have() -> None:
    """ids past prompt_len are output on every attempt, so the index counts on."""
    logits = spread_logits(vocab=1000)
    params = SamplingParams(temperature=1.0, seed=8)
    first = make_req(params, prompt=[1, 2], output=[3, 4])
    retried = Req(first.input_ids.clone(), 0, 0, 10, 1, params, None, prompt_len=2, attempt=2)
    assert sample_one(logits, retried) == sample_one(logits, first)


def test_penalties_count_prompt_and_output_as_documented_smp_06() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 7], logits[0, 8] = 1.0, 0.9
    strong: tuple[dict[str, Any], ...] = {"repetition_penalty": 2.0}, {"presence_penalty": 1.0}, {"frequency_penalty": 1.0}
    for penalties in strong:
        in_output = make_req(SamplingParams(**penalties), output=[7] * 50)
        assert sample_one(logits, in_output).token_id == 8
    in_prompt = [make_req(SamplingParams(**penalties), prompt=[7] * 50) for penalties in strong]
    assert [sample_one(logits, req).token_id for req in in_prompt] == [8, 7, 7]


def test_repetition_penalty_lowers_a_negative_logit_too() -> None:
    logits = torch.full((1, VOCAB), -5.0)
    logits[0, 7], logits[0, 8] = -1.0, -1.5
    assert sample_one(logits, make_req(SamplingParams(repetition_penalty=2.0), prompt=[7])).token_id == 8


def test_min_tokens_holds_back_end_and_stop_tokens_until_then() -> None:
    logits = spread_logits()
    logits[0, EOS], logits[0, 5], logits[0, 6] = 90.0, 80.0, 70.0
    params = SamplingParams(min_tokens=2, stop_token_ids=(5,))
    assert sample_one(logits, make_req(params)).token_id == 6
    assert sample_one(logits, make_req(params, output=[6])).token_id == 6
    assert sample_one(logits, make_req(params, output=[6, 6])).token_id == EOS
    ignoring = SamplingParams(min_tokens=2, ignore_eos=True)
    assert sample_one(logits, make_req(ignoring)).token_id == EOS, "an ignored end token is a token like others"


def test_a_bias_cannot_bring_an_end_token_back_before_min_tokens() -> None:
    params = SamplingParams(min_tokens=1, logit_bias={EOS: 100.0})
    assert sample_one(spread_logits(), make_req(params)).token_id != EOS


def test_logprobs_are_of_the_raw_logits_best_first() -> None:
    logits = spread_logits()
    expected = logits[0].double().log_softmax(-1)
    params = SamplingParams(temperature=0.3, top_k=4, seed=1, logit_bias={9: 100.0}, repetition_penalty=1.5)
    sampled = sample_one(logits, make_req(params, logprobs=5))
    assert sampled.token_id == 9
    assert sampled.logprob == pytest.approx(float(expected[9]), abs=1e-5)
    best = expected.argsort(descending=True)[:5].tolist()
    assert [token for token, _ in sampled.top] == best
    assert [value for _, value in sampled.top] == pytest.approx([float(expected[token]) for token in best], abs=1e-5)


def test_logprobs_0_gives_the_chosen_only_and_none_gives_nothing() -> None:
    logits = spread_logits()
    assert sample_one(logits, make_req(SamplingParams())) == Sampled(int(logits.argmax()))
    chosen = sample_one(logits, make_req(SamplingParams(), logprobs=0))
    assert chosen.logprob == pytest.approx(float(logits[0].log_softmax(-1).max()), abs=1e-6)
    assert chosen.top == ()


def test_a_greedy_token_leads_its_alternatives_also_in_a_tie() -> None:
    logits = torch.zeros(1, VOCAB, dtype=torch.bfloat16)
    logits[0, [11, 12, 13, 14]] = 2.0
    sampled = sample_one(logits, make_req(SamplingParams(), logprobs=3))
    assert sampled.token_id == 11
    assert [token for token, _ in sampled.top] == [11, 12, 13]


def test_more_alternatives_than_tokens_gives_all_tokens() -> None:
    assert len(sample_one(spread_logits(vocab=4), make_req(SamplingParams(), logprobs=20)).top) == 4


def test_logits_are_left_as_they_were() -> None:
    logits = spread_logits(3)
    before = logits.clone()
    params = [
        SamplingParams(temperature=1.0, seed=1, top_p=0.5, min_tokens=3),
        SamplingParams(logit_bias={1: 5.0}),
        SamplingParams(),
    ]
    Sampler([EOS]).sample(logits, [SampleRow(make_req(p), i, 0) for i, p in enumerate(params)])
    assert torch.equal(logits, before)


def test_best_ids_are_exact_also_with_ties() -> None:
    values = torch.tensor([1.0, 3.0, 2.0, 3.0, 2.0, 2.0])
    assert best_ids(values, 1).tolist() == [1]
    assert best_ids(values, 2).tolist() == [1, 3]
    assert best_ids(values, 4).tolist() == [1, 2, 3, 4]
    assert best_ids(values, 6).tolist() == list(range(6))


@pytest.mark.parametrize("size", [3, 100, 20_000])
def test_the_nucleus_is_the_fewest_tokens_that_reach_top_p(size: int) -> None:
    weights = torch.rand(size, generator=torch.Generator().manual_seed(size)).exp()
    order = np.argsort(-weights.numpy(), kind="stable")
    cumulative = np.cumsum(weights.double().numpy()[order])
    for top_p in (1e-9, 0.1, 0.5, 0.9, 0.999):
        count = int((cumulative < top_p * cumulative[-1]).sum()) + 1
        assert nucleus_ids(weights, top_p).tolist() == sorted(order[:count].tolist())


@pytest.mark.parametrize(("top_p", "ids"), [(0.5, [1]), (0.51, [0, 1]), (0.75, [0, 1]), (0.76, [0, 1, 2]), (1.0, [0, 1, 2])])
def test_the_nucleus_is_exact_at_its_edge_and_takes_the_first_of_equals(top_p: float, ids: list[int]) -> None:
    assert nucleus_ids(torch.tensor([0.5, 1.0, 0.5]), top_p).tolist() == ids
