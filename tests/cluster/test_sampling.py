"""Sampling through the whole service: parameters, seeds, neighbours, the first token after the hand-off."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers import reference
from tests.helpers.client import Client
from tests.helpers.cluster import Cluster
from tests.helpers.prompts import prompt

pytestmark = pytest.mark.cluster

VOCAB = 384


async def ids_of(client: Client, ids: list[int], **sampling: Any) -> list[int]:
    return (await client.generate(ids, sampling={"ignore_eos": True} | sampling)).ids


async def test_smp_01_a_seeded_request_is_not_disturbed_by_its_neighbours(client: Client) -> None:
    ids = prompt(12, seed=1)
    seeded = {"seed": 42, "temperature": 0.8, "max_tokens": 32}
    outputs = []
    crowds: list[list[dict[str, int]]] = [[], [{}] * 8, [{"seed": i} for i in range(8)]]
    for neighbours in crowds:
        for _ in range(3):
            beside = [ids_of(client, prompt(9, seed=i), temperature=0.8, max_tokens=40, **n) for i, n in enumerate(neighbours)]
            outputs.append((await asyncio.gather(ids_of(client, ids, **seeded), *beside))[0])
    assert all(output == outputs[0] for output in outputs)


@pytest.mark.parametrize(("temperature", "top_p"), list(itertools.product([1e-4, 1e-5, 1e-8], [1.0, 0.5])))
async def test_smp_02_a_very_small_temperature_is_greedy(client: Client, tiny: Path, temperature: float, top_p: float) -> None:
    ids = prompt(7)
    assert await ids_of(client, ids, temperature=temperature, top_p=top_p, max_tokens=10) == reference.greedy(tiny, ids, 10)


async def test_smp_05_every_top_k_in_one_mixed_batch(client: Client, tiny: Path) -> None:
    ids = prompt(8)
    top_ks = [-1, 0, 1, VOCAB, VOCAB + 1, 2**31 - 1]
    sampled = [ids_of(client, ids, top_k=k, temperature=1.0, seed=7, max_tokens=20) for k in top_ks]
    plain = [ids_of(client, ids, max_tokens=20) for _ in range(4)]
    results = await asyncio.gather(*sampled, *plain)
    expected = reference.greedy(tiny, ids, 20)
    assert results[2] == expected and all(result == expected for result in results[6:])
    off = results[0]
    assert off != expected and all(results[i] == off for i in (1, 3, 4, 5)), "0, -1 and the vocabulary or more are off"


async def test_smp_06_penalties_see_the_prompt_and_the_first_token(client: Client, tiny: Path) -> None:
    ids = [17] * 50
    expected = penalised(tiny, ids, 10, repetition=1.8, frequency=0.7, presence=0.9)
    given = {"repetition_penalty": 1.8, "frequency_penalty": 0.7, "presence_penalty": 0.9, "max_tokens": 10}
    assert await ids_of(client, ids, **given) == expected
    assert expected != reference.greedy(tiny, ids, 10), "the penalties must matter for this prompt"


def penalised(model: Path, ids: list[int], count: int, *, repetition: float, frequency: float, presence: float) -> list[int]:
    """Greedy with penalties, straight from their definitions."""
    output: list[int] = []
    for _ in range(count):
        scores = reference.logits(model, ids + output)[-1].double()
        for token in {*ids, *output}:
            scores[token] = scores[token] / repetition if scores[token] > 0 else scores[token] * repetition
        for token, times in Counter(output).items():
            scores[token] -= frequency * times + presence
        output.append(int(scores.argmax()))
    return output


async def test_smp_08_ignore_eos_ignores_every_end_token(tiny: Path, tmp_path: Path) -> None:
    from tests.helpers.tiny_model import make_tiny_model

    ids = prompt(5)
    ends = sorted(set(reference.greedy(tiny, ids, 10)))[:3]
    model = make_tiny_model(tmp_path / "model", eos=ends)
    with Cluster(tmp_path, model, worker_args=["--pool-pages", "32"]) as cluster:
        async with cluster.client() as client:
            answer = await client.generate(ids, sampling={"ignore_eos": True, "max_tokens": 50})
            assert len(answer.ids) == 50 and answer.reason == "LENGTH"
            stopped = await client.generate(ids, sampling={"max_tokens": 50})
            assert stopped.reason == "STOP" and stopped.ids[-1] in ends and len(stopped.ids) <= 10
            minimum = await client.generate(ids, sampling={"max_tokens": 50, "min_tokens": 20})
            assert len(minimum.ids) >= 20 and not set(minimum.ids[:19]) & set(ends)
            await cluster.assert_idle(client)


async def test_smp_10_temperature_0_is_greedy_whatever_the_filters(client: Client, tiny: Path) -> None:
    ids = prompt(11)
    grid = itertools.product([0.1, 0.9, 1.0], [-1, 1, 50], [{}, {"seed": 3}])
    calls = [ids_of(client, ids, temperature=0.0, top_p=p, top_k=k, max_tokens=12, **seed) for p, k, seed in grid]
    expected = reference.greedy(tiny, ids, 12)
    assert all(result == expected for result in await asyncio.gather(*calls))
    assert await ids_of(client, ids, temperature=0.0, top_p=0.1, max_tokens=12) == expected


async def test_smp_12_unseeded_sampling_differs_and_seeded_does_not(client: Client) -> None:
    ids = prompt(6)
    unseeded = await asyncio.gather(*(ids_of(client, ids, temperature=1.0, max_tokens=8) for _ in range(20)))
    assert len({tuple(output) for output in unseeded}) > 10
    seeded = await asyncio.gather(*(ids_of(client, ids, temperature=1.0, max_tokens=8, seed=5) for _ in range(5)))
    assert len({tuple(output) for output in seeded}) == 1


async def test_smp_12_a_restart_does_not_repeat_unseeded_sampling(tiny: Path, tmp_path: Path) -> None:
    ids = prompt(6)
    runs = []
    for start in ("first", "second"):
        (tmp_path / start).mkdir()
        with Cluster(tmp_path / start, tiny, worker_args=["--pool-pages", "32"]) as cluster:
            async with cluster.client() as client:
                runs.append([await ids_of(client, ids, temperature=1.0, max_tokens=8) for _ in range(5)])
                runs[-1].append(await ids_of(client, ids, temperature=1.0, max_tokens=8, seed=9))
    assert runs[0][:5] != runs[1][:5] and runs[0][5] == runs[1][5]


async def test_hnd_13_the_first_token_obeys_the_sampling_parameters(client: Client, tiny: Path) -> None:
    ids = prompt(10, seed=13)
    draws = [ids_of(client, ids, temperature=2.0, top_k=0, seed=seed, max_tokens=1) for seed in range(300)]
    counts = Counter(output[0] for output in await asyncio.gather(*draws))
    expected = torch.softmax(reference.logits(tiny, ids)[-1].double() / 2.0, dim=-1) * 300
    assert chi_square_p(counts, expected) > 0.001
    greedy = reference.greedy(tiny, ids, 1)
    assert await ids_of(client, ids, temperature=2.0, top_k=1, max_tokens=1) == greedy
    banned = await ids_of(client, ids, max_tokens=1, logit_bias={greedy[0]: -100.0})
    assert banned != greedy
    forced = await ids_of(client, ids, max_tokens=1, logit_bias={33: 100.0})
    assert forced == [33]


def chi_square_p(counts: Counter[int], expected: torch.Tensor) -> float:
    """p-value that counts were drawn with these expectations; bins below 5 are pooled."""
    rare = expected < 5
    bins = [(counts[int(token)], float(expected[token])) for token in (~rare).nonzero().flatten()]
    bins.append((sum(counts[int(token)] for token in rare.nonzero().flatten()), float(expected[rare].sum())))
    statistic = sum((seen - wanted) ** 2 / wanted for seen, wanted in bins)
    half = torch.tensor((len(bins) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half, torch.tensor(statistic / 2, dtype=torch.float64)))


async def test_n_completions_share_the_prompt_and_differ_as_their_seeds_say(client: Client) -> None:
    ids = prompt(21, seed=4)
    sampling = {"temperature": 1.0, "max_tokens": 12, "seed": 11, "ignore_eos": True}
    answer = await client.generate(ids, n=4, sampling=sampling)
    outputs = [tuple(answer.completions[i].ids) for i in range(4)]
    assert len(set(outputs)) == 4
    again = await client.generate(ids, n=4, sampling=sampling)
    assert [tuple(again.completions[i].ids) for i in range(4)] == outputs
    alone = await client.generate(ids, sampling=sampling)
    assert tuple(alone.ids) == outputs[0]


async def test_n_greedy_completions_are_equal(client: Client, tiny: Path) -> None:
    for length in (7, 8, 64):
        ids = prompt(length, seed=44)
        answer = await client.generate(ids, n=3, sampling={"max_tokens": 9, "ignore_eos": True})
        assert all(answer.completions[i].ids == reference.greedy(tiny, ids, 9) for i in range(3))
