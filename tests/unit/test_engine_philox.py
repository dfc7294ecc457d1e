"""Philox4x32-10 against the known answers published with Random123 (kat_vectors), and the uniforms made of it."""

from __future__ import annotations

import numpy as np
import pytest

from common.engine.philox import philox4x32, uniforms

KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> list[np.ndarray[tuple[int], np.dtype[np.uint64]]]:
    return [np.array([int(word, 16)], dtype=np.uint64) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(counter: str, key: str, answer: str) -> None:
    assert [f"{int(word[0]):08x}" for word in philox4x32(words(counter), words(key))] == answer.split()


def test_a_vector_of_draws_gives_what_each_gives_alone() -> None:
    draws = [(0, 0, 0), (7, 0, 0), (7, 1, 0), (7, 0, 1), (2**64 - 1, 15, 8191), (1 << 32, 0, 0)]
    together = uniforms(draws)
    assert together == [uniforms([draw])[0] for draw in draws]
    assert len(set(together)) == len(draws)


def test_uniforms_are_inside_the_unit_interval_and_even() -> None:
    values = np.array(uniforms([(seed, 0, index) for seed in range(100) for index in range(200)]))
    assert values.min() > 0 and values.max() < 1
    counts = np.histogram(values, bins=20, range=(0, 1))[0]
    chi_square = float(((counts - 1000.0) ** 2 / 1000.0).sum())
    assert chi_square < 50, "19 degrees of freedom: p < 1e-4 above 50"
