"""The device sampler draws what the CPU's draws, whatever is in the batch. (TRITON_INTERPRET=1 runs it without a GPU, slowly.)"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from common.core import Req, SamplingParams
from tests.gpu.sampling import (
    BATCHES,
    CUDA,
    DEVICE,
    ROWS,
    VOCAB,
    DeviceSampler,
    Level,
    Rig,
    could_draw,
    kept_weights,
    level_of,
    on_cpu,
    tokens,
)
from tests.helpers.sampling import EOS, make_req, spread_logits

FILTERS: list[dict[str, Any]] = [
    {},
    {"top_k": 5},
    {"top_k": VOCAB - 7},
    {"top_p": 0.3},
    {"top_p": 0.95},
    {"top_p": 0.9999},
    {"min_p": 0.05},
    {"top_k": 50, "top_p": 0.8},
    {"top_k": 200, "top_p": 0.9, "min_p": 0.01},
]


def random_req(rng: random.Random, filters: dict[str, Any], **fields: Any) -> Req:
    params = SamplingParams(temperature=rng.choice([0.3, 0.8, 1.0, 1.7]), seed=rng.getrandbits(64), **filters)
    return make_req(params, output=[0] * rng.randrange(4), completion=rng.randrange(3), **fields)


@pytest.fixture
def rig() -> Rig:
    return Rig()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_greedy_takes_the_first_of_equals(rig: Rig, dtype: torch.dtype) -> None:
    logits = spread_logits(ROWS, vocab=VOCAB).to(dtype)
    for row in range(ROWS):
        logits[row, [row * 3 + 1, row * 3 + 2, VOCAB - 1 - row]] = 50.0
    reqs = [make_req(SamplingParams()) for _ in range(ROWS)]
    for level in Level:
        assert tokens(rig.sample(logits, reqs, level=level)) == [row * 3 + 1 for row in range(ROWS)]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_draws_are_the_cpu_samplers_but_at_a_boundary(filters: dict[str, Any]) -> None:
    rigs = [Rig(shared_passes={ROWS: 3}), Rig(shared_passes={})]
    rng, drawn, differ = random.Random(str(filters)), 0, 0
    for batch in range(BATCHES):
        rig = rigs[batch % 2]
        logits = spread_logits(ROWS, vocab=VOCAB, seed=batch, scale=rng.choice([0.1, 1.0, 2.0, 6.0]))
        reqs = [random_req(rng, filters) for _ in range(ROWS)]
        drawn += ROWS
        for row, (here, there) in enumerate(zip(rig.sample(logits, reqs), on_cpu(logits, reqs), strict=True)):
            if here != there:
                differ += 1
                assert could_draw(here.token_id, logits[row], reqs[row]), reqs[row].sampling_params
    assert differ <= drawn / 100


@pytest.mark.parametrize("filters", FILTERS[1:], ids=str)
def test_ties_at_a_threshold_go_to_the_first_ids(rig: Rig, filters: dict[str, Any]) -> None:
    """Logits of few values, as bf16 and a small model make them."""
    rng = random.Random(1)
    for batch in range(1 + BATCHES // 10):
        logits = (spread_logits(ROWS, vocab=VOCAB, seed=batch) * 2).round().to(torch.bfloat16)
        reqs = [random_req(rng, filters) for _ in range(ROWS)]
        for row, (here, there) in enumerate(zip(rig.sample(logits, reqs), on_cpu(logits, reqs), strict=True)):
            assert here == there or could_draw(here.token_id, logits[row].float(), reqs[row])


@pytest.mark.parametrize("filters", [{"top_k": 27}, {"top_p": 0.8}, {"top_k": 30, "top_p": 0.9}], ids=str)
def test_what_is_dropped_among_many_ties_shifts_no_draw(filters: dict[str, Any]) -> None:
    """Half of the tokens are best, half of the others are kept, and a draw may come after the dropped ones as well as before."""
    rig, rng = Rig(vocab=40), random.Random(2)
    logits = torch.arange(40).remainder(2).flip(0).float().expand(ROWS, -1).contiguous()
    for _ in range(4):
        reqs = [make_req(SamplingParams(temperature=1.0, seed=rng.getrandbits(64), **filters)) for _ in range(ROWS)]
        assert tokens(rig.sample(logits, reqs)) == tokens(on_cpu(logits, reqs))


@pytest.mark.parametrize("shared_passes", [{}, {ROWS: 1}], ids=str)
@pytest.mark.parametrize("filters", [{"top_k": 17}, {"top_p": 0.6}], ids=str)
def test_what_does_not_fit_where_a_search_copies_it_is_searched_in_place(
    filters: dict[str, Any], shared_passes: dict[int, int]
) -> None:
    """The tokens at issue all have the same place in a block, of which there are more than may be copied together."""
    rig = Rig(rows=2, block=16, shared_passes=shared_passes)
    logits = torch.full((2, VOCAB), -50.0)
    logits[:, 3 : 3 + 16 * 24 : 16] = spread_logits(2, vocab=24, scale=0.1)
    reqs = [make_req(SamplingParams(temperature=1.0, seed=row, **filters)) for row in range(2)]
    for index in range(2):
        assert tokens(rig.sample(logits, reqs)) == tokens(on_cpu(logits, reqs)), index
        for req in reqs:
            req.append_host(torch.tensor([0], dtype=torch.int32))


@pytest.mark.parametrize("filters", [{}, {"top_k": 3}, {"top_p": 0.7}, {"min_p": 0.2}], ids=str)
def test_frequencies_are_the_distributions(filters: dict[str, Any]) -> None:
    vocab, rows, count = 8, ROWS, 40 if CUDA else 8
    rig = Rig(vocab=vocab)
    logits = spread_logits(1, vocab=vocab)
    seen = np.zeros(vocab)
    for batch in range(count):
        reqs = [make_req(SamplingParams(temperature=1.0, seed=batch * rows + row, **filters)) for row in range(rows)]
        np.add.at(seen, tokens(rig.sample(logits.expand(rows, -1).contiguous(), reqs)), 1)
    weights = kept_weights(logits[0], reqs[0].sampling_params)
    expected = weights / weights.sum() * seen.sum()
    assert (seen[expected == 0] == 0).all()
    chi_squared = ((seen - expected)[expected > 0] ** 2 / expected[expected > 0]).sum()
    assert chi_squared < 24.3  # 0.1 % of all with 7 degrees of freedom


@pytest.mark.parametrize("temperature", [1e-30, 1e-4, 100.0])
@pytest.mark.parametrize("scale", [0.0, 1.0, 1e30])
def test_extremes_give_a_token_that_the_cpu_might(rig: Rig, temperature: float, scale: float) -> None:
    logits = spread_logits(ROWS, vocab=VOCAB, scale=scale)
    logits[:, 7] = float("-inf")
    reqs = [
        make_req(SamplingParams(temperature=temperature, seed=row, **FILTERS[row % len(FILTERS)]), logprobs=3)
        for row in range(ROWS)
    ]
    for row, (here, there) in enumerate(zip(rig.sample(logits, reqs), on_cpu(logits, reqs), strict=True)):
        assert here.token_id == there.token_id or could_draw(here.token_id, logits[row], reqs[row])


def test_a_draw_depends_neither_on_the_slot_nor_on_the_batch(rig: Rig) -> None:
    logits = spread_logits(ROWS, vocab=VOCAB)
    reqs = [random_req(random.Random(row), FILTERS[row % 3]) for row in range(ROWS)]
    together = tokens(rig.sample(logits, reqs))
    slots = list(range(ROWS))
    random.Random(3).shuffle(slots)
    for row in (0, 1, 2, ROWS - 1):
        assert tokens(rig.sample(logits[row : row + 1], [reqs[row]], [slots[row]])) == [together[row]]
    order = slots[: ROWS // 2]
    some = rig.sample(logits[order], [reqs[row] for row in order], slots[ROWS // 2 :], level=Level.FULL)
    assert tokens(some) == [together[row] for row in order]


def test_advance_moves_the_stream_on_as_more_output_does(rig: Rig) -> None:
    logits = spread_logits(2, vocab=VOCAB)
    reqs = [make_req(SamplingParams(temperature=1.0, seed=row)) for row in range(2)]
    rig.load(reqs)
    for _ in range(4):
        assert rig.step(logits, reqs) == on_cpu(logits, reqs)
        rig.sampler.advance(rig.slots([0, 1]))
        for row, req in enumerate(reqs):
            req.append_host(rig.sampler.tokens[row : row + 1].cpu().clone())


def test_rows_of_a_wider_tensor_are_read_where_they_are(rig: Rig) -> None:
    wide = spread_logits(3, vocab=VOCAB + 64)
    reqs = [random_req(random.Random(row), FILTERS[row]) for row in range(3)]
    logits = wide[:, :VOCAB]
    assert tokens(rig.sample(wide.to(DEVICE)[:, :VOCAB], reqs)) == tokens(on_cpu(logits, reqs))


def test_dummy_rows_give_token_0_and_change_nothing(rig: Rig) -> None:
    state, dummy = rig.state, rig.state.dummy_slot
    logits = spread_logits(3, vocab=VOCAB)
    logits[1] = float("nan")
    params = SamplingParams(temperature=1.0, seed=5, top_p=0.9, presence_penalty=1.0)
    req = make_req(params, logprobs=2)
    rig.load([req])
    rig.sampler.output.fill_(-7)
    for tensor in (state.params, state.stops, state.bias_ids, state.mask, state.history):
        tensor[dummy].fill_(-1)
    for level in Level:
        rig.sampler.sample(logits.to(DEVICE), rig.slots([0, dummy, dummy]), level)
        rig.sampler.advance(rig.slots([0, dummy, dummy]))
        assert rig.sampler.tokens[1:3].tolist() == [0, 0]
    assert (rig.sampler.tokens[3:] == -7).all() and (rig.sampler._details[1:] == -7).all()
    for tensor in (state.params, state.stops, state.bias_ids, state.mask, state.history):
        assert (tensor[dummy] == -1).all()


def test_outputs_of_live_rows_do_not_come_from_earlier_steps(rig: Rig) -> None:
    logits = spread_logits(ROWS, vocab=VOCAB)
    reqs = [random_req(random.Random(row), FILTERS[row % len(FILTERS)], logprobs=row % 4) for row in range(ROWS)]
    rig.load(reqs)
    first = rig.step(logits, reqs)
    sampler: DeviceSampler = rig.sampler
    for name, value in vars(sampler).items():
        if isinstance(value, torch.Tensor) and name != "_details":
            value.fill_(-77)
    assert rig.step(logits, reqs) == first


def test_a_level_serves_what_its_requests_need() -> None:
    greedy, drawn = make_req(SamplingParams()), make_req(SamplingParams(temperature=1.0, seed=1))
    assert level_of([]) is level_of([greedy, make_req(SamplingParams(temperature=1.0, top_k=1))]) is Level.GREEDY
    assert level_of([greedy, drawn]) is Level.RANDOM
    for filters in FILTERS[1:]:
        assert level_of([drawn, make_req(SamplingParams(temperature=1.0, seed=1, **filters))]) is Level.FILTERED
    for params in (SamplingParams(logit_bias={1: 1.0}), SamplingParams(presence_penalty=0.1), SamplingParams(min_tokens=2)):
        assert level_of([drawn, make_req(params)]) is Level.FULL
    assert level_of([make_req(SamplingParams(), logprobs=0)]) is Level.FULL
    assert level_of([make_req(SamplingParams(min_tokens=2), output=[1, 1])]) is Level.GREEDY
    assert level_of([make_req(SamplingParams(min_tokens=2, ignore_eos=True))]) is Level.GREEDY


@pytest.mark.skipif(not CUDA, reason="graphs need a GPU")
def test_a_graph_replays_what_launches_do(rig: Rig) -> None:
    logits = spread_logits(ROWS, vocab=VOCAB).to(DEVICE)
    reqs = [random_req(random.Random(row), FILTERS[row % len(FILTERS)]) for row in range(ROWS)]
    slots = rig.slots(range(ROWS))
    for level in (Level.FILTERED, Level.FULL):
        rig.sample(logits, reqs, level=level)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            rig.sampler.sample(logits, slots, level)
            rig.sampler.advance(slots)
        rig.load(reqs)
        launched = []
        for _ in range(3):
            launched.append(tokens(rig.step(logits, reqs, level=level)))
            rig.sampler.advance(slots)
        rig.load(reqs)
        for step in range(3):
            graph.replay()
            assert rig.sampler.tokens.tolist() == launched[step]


def test_the_end_token_of_the_tests_is_in_every_vocabulary() -> None:
    assert EOS < 8 <= VOCAB
