"""The simulated language: who knows the prompt and the sampling parameters knows every token."""

from __future__ import annotations

import pytest

from common.core import SamplingParams
from common.engine.sim.tokens import EMPTY, SimVocabulary, chain, expected_output

WORDS = SimVocabulary(384, frozenset({0, 100, 383}))
PROMPT = [5, 6, 7, 8, 9]


def said(prompt: list[int], count: int = 40, *, completion: int = 0, **sampling: float | int) -> list[int]:
    return expected_output(prompt, count, vocabulary=WORDS, params=SamplingParams(**sampling), completion=completion)  # type: ignore[arg-type]


def test_a_chain_goes_on_from_any_prefix() -> None:
    assert chain(PROMPT) == chain(PROMPT[2:], chain(PROMPT[:2])) == chain(PROMPT, EMPTY)
    assert len({chain(ids) for ids in (PROMPT, PROMPT[:-1], PROMPT[::-1], [*PROMPT, 9], [5, 7, 6, 8, 9])}) == 5


def test_an_end_token_is_never_said_and_every_other_token_may_be() -> None:
    small = SimVocabulary(6, frozenset({0, 3}))
    assert set(expected_output(PROMPT, 200, vocabulary=small)) == {1, 2, 4, 5}
    with pytest.raises(ValueError, match="a token that ends nothing"):
        SimVocabulary(1, frozenset({0}))


@pytest.mark.parametrize("damage", [[5, 6, 8, 9], [5, 6, 7, 7, 8, 9], [5, 7, 6, 8, 9], [5, 6, 7, 8, 10]])
def test_a_lost_doubled_swapped_or_changed_token_shows_in_all_that_follows(damage: list[int]) -> None:
    whole, damaged = said(PROMPT), said(damage)
    assert sum(a == b for a, b in zip(whole, damaged, strict=True)) < 4


def test_greedy_depends_on_neither_seed_nor_completion_and_sampling_on_both() -> None:
    assert said(PROMPT) == said(PROMPT, seed=1) == said(PROMPT, completion=1) == said(PROMPT, temperature=1.0, top_k=1, seed=2)
    drawn = [said(PROMPT, temperature=1.0, seed=seed, completion=n) for seed in (0, 1, 2) for n in (0, 1, 2)]
    assert len({tuple(output) for output in [said(PROMPT), *drawn]}) == 10


def test_a_later_attempt_goes_on_with_the_same_words() -> None:
    """Its prompt is longer by what was streamed, its output index the same."""
    whole = said(PROMPT, temperature=0.7, seed=3)
    params = SamplingParams(temperature=0.7, seed=3)
    so_far = chain([*PROMPT, *whole[:17]])
    assert WORDS.next_token(so_far, params, completion=0, index=17) == whole[17]


def test_logprobs_are_made_up_but_in_order() -> None:
    one = WORDS.sample(chain(PROMPT), SamplingParams(), completion=0, index=0, logprobs=3)
    assert one.token_id == said(PROMPT, 1)[0] == one.top[0][0] and one.logprob == one.top[0][1]
    assert len({token for token, _ in one.top}) == 3 and [value for _, value in one.top] == sorted([v for _, v in one.top])[::-1]
    assert WORDS.sample(chain(PROMPT), SamplingParams(), completion=0, index=0, logprobs=None).logprob is None
