"""The kinds of rule that request fields have. Each raises InvalidRequest with field, rule and given value."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from ctypes import c_float
from typing import NamedTuple

from common.errors import InvalidRequest, OutOfRange

SHOWN = 200
"""Characters of a bad text that go into an error, which shortens them further."""


class FloatRule(NamedTuple):
    """A closed range. Written as what must hold, so that NaN fails it."""

    low: float
    high: float
    text: str

    def check(self, field: str, given: float) -> float:
        if not self.low <= given <= self.high:
            raise InvalidRequest(field, f"must be in {self.text}", _as_written(given))
        return given


def _as_written(given: float) -> float:
    """The shortest number that float32 rounds to given: the client wrote 1.1, not 1.100000023841858."""
    shorter = (float(f"{given:.{digits}g}") for digits in range(6, 9))
    return next((number for number in shorter if c_float(number).value == given), given)


class LengthRule(NamedTuple):
    """most: tokens that a prompt may have; why: what that follows from."""

    most: int
    why: str

    def check(self, tokens: int, *, field: str = "prompt") -> None:
        if tokens > self.most:
            raise OutOfRange(field, self._text, tokens)

    def broken_by(self, tokens: int, *, chars: int, of: int) -> OutOfRange:
        """A text's first chars of its characters alone have so many tokens."""
        return OutOfRange("prompt", f"{self._text}, not that many in its first {chars} of {of} characters", tokens)

    @property
    def _text(self) -> str:
        return f"must have at most {self.most} tokens ({self.why})"


SMALLEST = 2.0**-149  # above 0 in float32

FLOATS = {
    "temperature": FloatRule(0.0, 100.0, "[0, 100]"),
    "top_p": FloatRule(SMALLEST, 1.0, "(0, 1]"),
    "min_p": FloatRule(0.0, 1.0, "[0, 1]"),
    # Far beyond use, and near enough that no logit becomes infinite.
    "repetition_penalty": FloatRule(1e-3, 1e4, "[0.001, 10000]"),
    "frequency_penalty": FloatRule(-2.0, 2.0, "[-2, 2]"),
    "presence_penalty": FloatRule(-2.0, 2.0, "[-2, 2]"),
}
BIAS = FloatRule(-100.0, 100.0, "[-100, 100]")


def check_at_least(field: str, given: int, limit: int) -> int:
    if given < limit:
        raise InvalidRequest(field, f"must be at least {limit}", given)
    return given


def check_at_most(field: str, given: int, limit: int) -> int:
    if given > limit:
        raise InvalidRequest(field, f"must be at most {limit}", given)
    return given


def check_entries(field: str, entries: Sized, limit: int) -> None:
    """Counts without reading: half a million entries cost nothing."""
    if len(entries) > limit:
        raise InvalidRequest(field, f"must have at most {limit} entries", len(entries))


def check_bytes(field: str, text: str, limit: int) -> str:
    if len(text) > limit or len(text.encode()) > limit:
        raise InvalidRequest(field, f"must be at most {limit} bytes", len(text.encode()))
    return text


def check_ids(field: str, ids: Sequence[int], *, vocab_size: int) -> None:
    """Names the position of the first id outside the vocabulary. No ids are fine."""
    if ids and (max(ids) >= vocab_size or min(ids) < 0):
        position = next(i for i, token_id in enumerate(ids) if not 0 <= token_id < vocab_size)
        raise InvalidRequest(f"{field}[{position}]", vocab_rule(vocab_size), ids[position])


def vocab_rule(vocab_size: int) -> str:
    return f"must be in [0, {vocab_size}), the vocabulary size being {vocab_size}"
