"""Traffic: who asks what when. Pure: the same seed gives the same requests, whatever serves them.

steady     Poisson arrivals, prompts that share nothing, lengths from a few tokens to many thousand
bursts     the same mean rate, but every second (simulated) has a tenth in which three times as many come
documents  Poisson; each prompt is a question about one of many documents, a few of which are popular (Zipf)
chats      Poisson over conversations, the busy ones more often (Zipf); each turn repeats all before it
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Literal, get_args

import numpy as np

TraceName = Literal["steady", "bursts", "documents", "chats"]
TRACES: Final[tuple[TraceName, ...]] = get_args(TraceName)
BURST_PERIOD, BURST_SHARE, BURST_FACTOR = 1.0, 0.1, 3.0
"""Simulated seconds; the part of them that is a burst; its rate over the mean."""
DOCUMENTS, CONVERSATIONS = 256, 512
LONGEST_CHAT: Final = 8192
"""Tokens after which a conversation begins anew."""


@dataclass(frozen=True)
class Question:
    """at: simulated seconds after the start. session: empty if it belongs to none."""

    at: float
    prompt: bytes
    output_tokens: int
    session: str = ""


class Traffic:
    """rate: requests per simulated second. Token ids are bytes."""

    def __init__(self, trace: TraceName, *, rate: float, seconds: float, seed: int) -> None:
        self._rng = random.Random(f"{trace}/{seed}")
        self._words = np.random.default_rng(seed)
        self._rate = rate
        self._seconds = seconds
        self._trace = trace

    def questions(self) -> list[Question]:
        times = list(_bursts(self._rng, self._rate, self._seconds) if self._trace == "bursts" else self._poisson())
        ask: Callable[[], tuple[bytes, str]] = {
            "steady": self._fresh,
            "bursts": self._fresh,
            "documents": self._about_documents(),
            "chats": self._in_chats(),
        }[self._trace]
        return [Question(at, *_prompt_first(ask(), self._output())) for at in times]

    def _poisson(self) -> Iterator[float]:
        at = 0.0
        while (at := at + self._rng.expovariate(self._rate)) < self._seconds:
            yield at

    def _fresh(self) -> tuple[bytes, str]:
        return self._text(self._log_normal(median=700, sigma=1.0, most=16_000)), ""

    def _about_documents(self) -> Callable[[], tuple[bytes, str]]:
        documents = [self._text(self._log_normal(median=2000, sigma=0.5, most=8000)) for _ in range(DOCUMENTS)]
        weights = zipf(DOCUMENTS)

        def ask() -> tuple[bytes, str]:
            (document,) = self._rng.choices(documents, weights)
            return document + self._text(self._log_normal(median=60, sigma=0.7, most=500)), ""

        return ask

    def _in_chats(self) -> Callable[[], tuple[bytes, str]]:
        said = [self._text(300) for _ in range(CONVERSATIONS)]
        weights = zipf(CONVERSATIONS, exponent=0.8)

        def ask() -> tuple[bytes, str]:
            (which,) = self._rng.choices(range(CONVERSATIONS), weights)
            if len(said[which]) > LONGEST_CHAT:
                said[which] = self._text(300)
            said[which] += self._text(self._log_normal(median=150, sigma=0.8, most=1500))  # Answer and next question.
            return said[which], f"chat-{which}"

        return ask

    def _output(self) -> int:
        return self._log_normal(median=40, sigma=0.6, most=200)

    def _text(self, count: int) -> bytes:
        return self._words.integers(0, 256, count, dtype=np.uint8).tobytes()

    def _log_normal(self, *, median: float, sigma: float, most: int) -> int:
        return max(2, min(most, round(self._rng.lognormvariate(math.log(median), sigma))))


def zipf(count: int, *, exponent: float = 1.0) -> list[float]:
    """Weights of ranks 1 to count."""
    return [rank**-exponent for rank in range(1, count + 1)]


def _bursts(rng: random.Random, rate: float, seconds: float) -> Iterator[float]:
    """Thinned from a Poisson stream of the highest rate."""
    calm = rate * (1 - BURST_SHARE * BURST_FACTOR) / (1 - BURST_SHARE)
    at = 0.0
    while (at := at + rng.expovariate(rate * BURST_FACTOR)) < seconds:
        in_burst = at % BURST_PERIOD < BURST_SHARE * BURST_PERIOD
        if in_burst or rng.random() < calm / (rate * BURST_FACTOR):
            yield at


def _prompt_first(asked: tuple[bytes, str], output_tokens: int) -> tuple[bytes, int, str]:
    return asked[0], output_tokens, asked[1]
