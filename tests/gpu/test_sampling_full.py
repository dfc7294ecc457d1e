"""What only the device sampler's highest level does, as the CPU sampler does it: penalties, bias, masks, log-probabilities."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from common.core import Req, SamplingParams
from router.request.valid_request import MAX_BIAS, MAX_LOGPROBS, MAX_STOP_TOKENS
from tests.gpu.sampling import CUDA, ROWS, VOCAB, Level, Rig, on_cpu, tokens
from tests.helpers.sampling import EOS, make_req, spread_logits

from common.engine.cuda import sampling_state  # isort: skip
from common.engine.cuda.jit import sampling_slots  # isort: skip

STEPS = 6
PENALTIES: list[dict[str, Any]] = [
    {"repetition_penalty": 1.4},
    {"frequency_penalty": 0.7},
    {"presence_penalty": -1.5},
    {"repetition_penalty": 0.8, "frequency_penalty": -0.3, "presence_penalty": 0.9},
]


def random_ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(count)]


def run_both(rig: Rig, reqs: list[Req], steps: int = STEPS) -> None:
    """Every step's logits are the same few peaks, so that what has been chosen comes up again and again."""
    rig.load(reqs)
    for step in range(steps):
        logits = spread_logits(len(reqs), vocab=VOCAB, seed=step % 2, scale=3.0)
        there = on_cpu(logits, reqs)
        assert tokens(rig.step(logits, reqs, level=Level.FULL)) == tokens(there)
        rig.sampler.advance(rig.slots(range(len(reqs))))
        for req, sampled in zip(reqs, there, strict=True):
            req.append_host(torch.tensor([sampled.token_id], dtype=torch.int32))


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_penalties_follow_prompt_and_output(temperature: float) -> None:
    rng = random.Random(0)
    params = [SamplingParams(temperature=temperature, seed=9, **penalties) for penalties in (*PENALTIES, {})]
    lengths = [(1, 0), (300, 3), (5, 40), (2000 if CUDA else 90, 0), (3, 2)]
    reqs = [make_req(p, prompt=random_ids(rng, a), output=random_ids(rng, b)) for p, (a, b) in zip(params, lengths, strict=True)]
    run_both(Rig(), reqs)


def test_a_new_request_in_a_slot_starts_with_its_own_history() -> None:
    rig, rng = Rig(), random.Random(0)
    params = SamplingParams(**PENALTIES[-1])
    for prompt in (random_ids(rng, 50), random_ids(rng, 2)):
        run_both(rig, [make_req(params, prompt=prompt) for _ in range(2)], steps=2)


def test_min_tokens_masks_what_would_end_the_output() -> None:
    rig = Rig()
    logits = spread_logits(4, vocab=VOCAB)
    logits[:, EOS], logits[:, 11] = 30.0, 20.0
    reqs = [
        make_req(SamplingParams(min_tokens=2)),
        make_req(SamplingParams(min_tokens=2, stop_token_ids=(11, VOCAB - 1), logit_bias={11: 100.0})),
        make_req(SamplingParams(min_tokens=2, ignore_eos=True, stop_token_ids=(11,))),
        make_req(SamplingParams(min_tokens=2), output=[1, 1]),
    ]
    rig.load(reqs)
    best = int(logits[1].argsort(descending=True)[2])
    for step in range(3):
        expected = [11, best, EOS, EOS] if step < 2 else [EOS, 11, EOS, EOS]
        assert tokens(rig.step(logits, reqs, level=Level.FULL)) == expected == tokens(on_cpu(logits, reqs))
        rig.sampler.advance(rig.slots(range(4)))
        for req in reqs:
            req.append_host(torch.tensor([0], dtype=torch.int32))


def test_bias_is_added_to_as_many_tokens_as_may_have_one() -> None:
    rng, count = random.Random(0), min(MAX_BIAS, VOCAB - 1)
    biases = [{}, {VOCAB - 1: 100.0}, {id: rng.uniform(-5, 5) for id in rng.sample(range(VOCAB), count)}]
    reqs = [make_req(SamplingParams(temperature=1.0, seed=row, top_p=0.9, logit_bias=bias)) for row, bias in enumerate(biases)]
    logits = spread_logits(3, vocab=VOCAB)
    assert tokens(Rig().sample(logits, reqs)) == tokens(on_cpu(logits, reqs))


def test_a_grammars_mask_is_a_slots_own_and_goes_with_its_request() -> None:
    rig = Rig()
    logits = spread_logits(3, vocab=VOCAB).to(torch.bfloat16)
    biased = SamplingParams(logit_bias={5: 100.0})
    reqs = [make_req(SamplingParams()), make_req(biased), make_req(SamplingParams(temperature=1.0, seed=1, top_k=4))]
    allowed = [torch.tensor(ids) for ids in ([VOCAB - 1, 31, 32], [6, 64])]
    rig.load(reqs)
    plain = rig.step(logits, reqs, level=Level.FULL)
    for slot, ids in enumerate(allowed):
        rig.state.set_mask(slot, mask_words(ids.tolist()))
    masked = tokens(rig.step(logits, reqs, level=Level.FULL))
    assert masked == [*(int(ids[logits[row, ids].float().argmax()]) for row, ids in enumerate(allowed)), plain[2].token_id]
    rig.state.set_mask(0, None)
    rig.load(reqs[1:2], [1])
    assert rig.step(logits, reqs, level=Level.FULL) == plain


def test_a_mask_leaves_a_draw_only_what_it_allows() -> None:
    rig, logits = Rig(), spread_logits(ROWS, vocab=VOCAB)
    reqs = [make_req(SamplingParams(temperature=2.0, seed=row, top_p=0.99, min_p=1e-6)) for row in range(ROWS)]
    rig.load(reqs)
    ids = [3, 77, 78, 300]
    for slot in range(ROWS):
        rig.state.set_mask(slot, mask_words(ids))
    forbidden = torch.full_like(logits, float("-inf"))
    forbidden[:, ids] = 0.0
    assert tokens(rig.step(logits, reqs, level=Level.FULL)) == tokens(on_cpu(logits + forbidden, reqs))


def mask_words(ids: list[int]) -> np.ndarray:
    bits = np.zeros(-(-VOCAB // 32) * 32, dtype=np.uint8)
    bits[ids] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probabilities_are_of_the_raw_logits(dtype: torch.dtype) -> None:
    """In bf16 many are equal: the first ids come first."""
    counts = [None, 0, 1, 5, MAX_LOGPROBS, 2]
    params = SamplingParams(temperature=1.0, seed=4, top_k=9, logit_bias={2: 3.0})
    reqs = [make_req(params, logprobs=count) for count in counts]
    logits = spread_logits(len(reqs), vocab=VOCAB).to(dtype)
    for here, there in zip(Rig().sample(logits, reqs), on_cpu(logits, reqs), strict=True):
        assert here.token_id == there.token_id and (here.logprob is None) == (there.logprob is None)
        assert here.logprob == (there.logprob and pytest.approx(there.logprob, abs=2e-5))
        assert [id for id, _ in here.top] == [id for id, _ in there.top]
        assert [value for _, value in here.top] == pytest.approx([value for _, value in there.top], abs=2e-5)


def test_log_probabilities_of_a_vocabulary_smaller_than_their_number() -> None:
    logits = spread_logits(1, vocab=8)
    reqs = [make_req(SamplingParams(), logprobs=MAX_LOGPROBS)]
    here, there = Rig(vocab=8).sample(logits, reqs)[0], on_cpu(logits, reqs)[0]
    assert [id for id, _ in here.top] == [id for id, _ in there.top] and len(here.top) == 8


def test_many_requests_of_all_kinds_travel_in_one_upload() -> None:
    rng, rig = random.Random(5), Rig()
    reqs = []
    for row in range(ROWS):
        fields: dict[str, Any] = {**PENALTIES[row % 4], "logit_bias": {row: 2.0, row + 1: -3.0}} if row % 3 else {}
        params = SamplingParams(temperature=0.7, seed=rng.getrandbits(64), min_tokens=row % 5, **fields)
        reqs.append(make_req(params, prompt=random_ids(rng, 1 + row), output=random_ids(rng, row % 4), completion=row))
    run_both(rig, reqs, steps=2)


def test_a_slot_holds_what_the_router_accepts_and_as_many_words_as_its_kernels_read() -> None:
    assert sampling_state.MAX_BIAS >= MAX_BIAS and sampling_state.MAX_TOP >= MAX_LOGPROBS
    assert sampling_state.MAX_STOP_TOKENS >= MAX_STOP_TOKENS
    assert sampling_state.PARAMS.size == 4 * sampling_slots.PARAMS.value
    assert sampling_state.UPLOAD.size == 4 * sampling_slots.HEADER.value
