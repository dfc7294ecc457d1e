"""Wishes: what is asked for, one after the other. The same seed asks for the same."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from common.core import SamplingParams
from common.engine.sim.tokens import SimVocabulary, expected_output


@dataclass(frozen=True)
class Wish:
    """cancel_after: deltas after which the client goes away; None: it stays. hurts: a fault comes with it."""

    prompt: list[int]
    tokens: int
    n: int
    sampling: SamplingParams
    cancel_after: int | None
    hurts: bool

    def answer(self, completion: int, vocabulary: SimVocabulary) -> list[int]:
        return expected_output(self.prompt, self.tokens, vocabulary=vocabulary, params=self.sampling, completion=completion)


@dataclass(frozen=True, kw_only=True)
class Taste:
    """prefixes: beginnings that prompts share, the first ones more often (Zipf). longest, most_tokens: of prompt and output.
    faults, cancels: of all requests, how many."""

    prefixes: int = 50
    longest: int = 400
    most_tokens: int = 48
    faults: float = 0.01
    cancels: float = 0.02
    ids: int = 256


def wishes(count: int, taste: Taste, *, seed: int) -> Iterator[Wish]:
    rng = random.Random(seed)
    beginnings = [_ids(rng, rng.randint(16, taste.longest // 2), taste.ids) for _ in range(taste.prefixes)]
    weights = [1 / rank for rank in range(1, taste.prefixes + 1)]
    for _ in range(count):
        (shared,) = rng.choices(beginnings, weights)
        begin = shared if rng.random() < 0.6 else []
        sampled = rng.random() < 0.5
        yield Wish(
            prompt=[*begin, *_ids(rng, rng.randint(1, taste.longest - len(begin)), taste.ids)],
            tokens=1 if rng.random() < 0.05 else rng.randint(2, taste.most_tokens),
            n=rng.choice((2, 3)) if rng.random() < 0.1 else 1,
            sampling=SamplingParams(temperature=0.8, seed=rng.getrandbits(32)) if sampled else SamplingParams(),
            cancel_after=rng.randint(0, 8) if rng.random() < taste.cancels else None,
            hurts=rng.random() < taste.faults,
        )


def _ids(rng: random.Random, count: int, below: int) -> list[int]:
    return [rng.randrange(below) for _ in range(count)]
