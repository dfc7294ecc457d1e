"""The simulated model's language: which token follows, as a function that anybody can evaluate.

    chain(ids)    CRC-32 over the ids' little-endian int32 bytes, so it goes on from any prefix's chain
    next token    mix64 of (chain of all ids so far, output index[, seed, completion]), modulo the ids that are not end tokens

It depends on every id before it and on the output index, so a token that is lost, doubled, swapped or taken from another request
changes all that follow; and on nothing else, so whichever worker and attempt goes on says the same. seed and completion count
only where a real sampler would draw (temperature above 0 and top_k other than 1); penalties, bias and filters do not count.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from common.core import SamplingParams
from common.engine.runner import Sampled
from common.wire import ids_to_bytes

_MASK = (1 << 64) - 1
EMPTY = 0
"""The chain of no ids."""


def chain(ids: Sequence[int], start: int = EMPTY) -> int:
    """Of ids that come after those whose chain is start."""
    return zlib.crc32(ids_to_bytes(ids), start)


def mix64(value: int) -> int:
    """splitmix64's output function (Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA '14)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


@dataclass(frozen=True)
class SimVocabulary:
    """size: of the model's embedding. eos_token_ids: never said, so that an output is as long as was asked for, unless one of the
    request's own stop tokens comes."""

    size: int
    eos_token_ids: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if self._count < 1:
            raise ValueError(f"a vocabulary must have a token that ends nothing, got {self.size} tokens")

    def next_token(self, so_far: int, params: SamplingParams, *, completion: int, index: int) -> int:
        """so_far: chain of prompt and output. index: of the token in the output."""
        return self._token(_draw(so_far, params, completion, index))

    def sample(self, so_far: int, params: SamplingParams, *, completion: int, index: int, logprobs: int | None) -> Sampled:
        """logprobs: see Req. The values are made up, and the same for the same token."""
        draw = _draw(so_far, params, completion, index)
        if logprobs is None:
            return Sampled(self._token(draw))
        top = [(self._token(draw + rank), -0.5 - rank) for rank in range(min(logprobs, self._count))]
        return Sampled(self._token(draw), -0.5, tuple(top))

    @property
    def _count(self) -> int:
        return self.size - len(self.eos_token_ids)

    def _token(self, draw: int) -> int:
        """Number draw of the ids that are not end tokens, in a circle."""
        token = draw % self._count
        for end in sorted(self.eos_token_ids):
            token += token >= end
        return token


def expected_output(
    prompt: Sequence[int],
    count: int,
    *,
    vocabulary: SimVocabulary,
    params: SamplingParams | None = None,
    completion: int = 0,
) -> list[int]:
    """The `count` tokens that simulated workers say after this prompt, stop tokens aside."""
    params = params or SamplingParams()
    so_far, output = chain(prompt), list[int]()
    for index in range(count):
        output.append(vocabulary.next_token(so_far, params, completion=completion, index=index))
        so_far = chain(output[-1:], so_far)
    return output


def _draw(so_far: int, params: SamplingParams, completion: int, index: int) -> int:
    value = mix64((so_far << 32) | index)
    return value if _is_greedy(params) else mix64(mix64(value ^ (params.seed or 0)) + completion)


def _is_greedy(params: SamplingParams) -> bool:
    return params.temperature <= 0.0 or params.top_k == 1
