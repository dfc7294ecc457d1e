"""Requests of every shape, by a random generator: each field left out, ordinary or at its limit, in any company."""

from __future__ import annotations

import random
from typing import Any

from common.rpc.gen.pdserve.v1 import generation_pb2 as pb
from tests.helpers.client import request
from tests.helpers.prompts import prompt

VOCAB = 384
LETTERS = "etaoinshrdl é\ufffd"
"""What stop strings are made of: common in the tiny model's text, so that many are met."""
BEGINNINGS = (1, 3, 4, 5, 8, 12, 16, 17, 24, 31, 32, 33)
"""Lengths around pages of 4 and 16 tokens."""

TEMPERATURES = (0.0, -0.0, 1e-45, 1e-6, 0.3, 1.0, 2.5, 100.0)
CHOICES: dict[str, tuple[Any, ...]] = {
    "temperature": (*TEMPERATURES, *TEMPERATURES),
    "top_k": (-1, 0, 1, 2, 5, VOCAB - 1, VOCAB, 2**31 - 1),
    "top_p": (1e-45, 1e-6, 0.1, 0.5, 0.9, 1.0),
    "min_p": (0.0, 1e-45, 0.05, 0.5, 1.0),
    "repetition_penalty": (0.001, 0.5, 1.0, 1.3, 10_000.0),
    "frequency_penalty": (-2.0, 0.0, 0.5, 2.0),
    "presence_penalty": (-2.0, 0.0, 0.3, 2.0),
    "ignore_eos": (True,),
}


class AnyRequest:
    """make() is a new one each time; prompts share beginnings. longest: most tokens of output."""

    def __init__(self, rng: random.Random, *, longest: int = 40) -> None:
        self._rng = rng
        self._longest = longest
        self._families = [prompt(max(BEGINNINGS), seed=rng.randrange(2**32)) for _ in range(4)]

    def make(self) -> pb.GenerateRequest:
        rng = self._rng
        rest = prompt(rng.choice((0, 0, 1, 2, 5)), seed=rng.randrange(2**32))
        ids = rng.choice(self._families)[: rng.choice(BEGINNINGS)] + rest
        max_tokens = rng.choice((1, 1, 2, 3, 4, 5, 8, 13, 24, self._longest))
        return request(ids, sampling=self._sampling(max_tokens), **self._fields(max_tokens))

    def _sampling(self, max_tokens: int) -> dict[str, Any]:
        rng = self._rng
        sampling: dict[str, Any] = {name: rng.choice(values) for name, values in CHOICES.items() if rng.random() < 0.35}
        sampling["max_tokens"] = max_tokens
        if rng.random() < 0.8:
            sampling["seed"] = rng.choice((0, 1, 2**63 - 1, 2**63, 2**64 - 1, rng.getrandbits(64)))
        if rng.random() < 0.3:
            sampling["min_tokens"] = rng.randint(0, max_tokens)
        if rng.random() < 0.3:
            sampling["stop_token_ids"] = [rng.randrange(VOCAB) for _ in range(rng.choice((1, 3, 60)))]
        if rng.random() < 0.3:
            biased = [rng.randrange(VOCAB) for _ in range(rng.choice((1, 3, 200)))]
            sampling["logit_bias"] = {token: rng.choice((-100.0, 100.0, -0.0, 3.0, -5.0, 1e-45)) for token in biased}
        return sampling

    def _fields(self, max_tokens: int) -> dict[str, Any]:
        rng = self._rng
        fields: dict[str, Any] = {"priority": rng.choice((0, 0, 0, 5, -5, 2**31 - 1, -(2**31)))}
        if rng.random() < 0.3:
            fields["n"] = rng.choice((1, 2, 3, 16 if max_tokens <= 8 else 3))
        if rng.random() < 0.4:
            fields["logprobs"] = rng.choice((0, 1, 5, 20))
        if rng.random() < 0.3:
            fields["include_special_tokens"] = True
        if rng.random() < 0.2:
            return fields | {"ids_only": True}
        if rng.random() < 0.5:
            count = rng.choice((1, 2, 5, 16))
            fields["stop"] = ["".join(rng.choices(LETTERS, k=rng.choice((1, 1, 2, 3)))) for _ in range(count)]
            fields["include_stop"] = rng.random() < 0.5
        return fields
