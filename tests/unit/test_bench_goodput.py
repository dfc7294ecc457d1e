"""The search for the highest rate: right, bounded, and never twice at the same rate."""

from __future__ import annotations

import math

import pytest

from bench.serving.goodput import highest_that_holds, rate_grid


@pytest.mark.parametrize("count", [1, 2, 3, 7, 64])
def test_the_search_finds_the_edge_wherever_it_is_and_wherever_it_starts(count: int) -> None:
    for edge in range(-1, count):
        for start in {0, count // 2, count - 1}:
            asked: list[int] = []

            def holds(index: int, asked: list[int] = asked, edge: int = edge) -> bool:
                asked.append(index)
                return index <= edge

            assert highest_that_holds(count, holds, start=start) == (edge if edge >= 0 else None)
            assert len(asked) == len(set(asked)), "a measurement takes half a minute"
            assert all(0 <= index < count for index in asked)
            assert len(asked) <= 2 * math.log2(count + 1) + 2


def test_a_search_that_starts_near_the_edge_is_short() -> None:
    asked: list[int] = []
    assert highest_that_holds(1000, lambda index: asked.append(index) or index <= 500, start=500) == 500  # type: ignore[func-returns-value]
    assert asked == [500, 501]


def test_rates_rise_by_the_ratio_to_the_highest() -> None:
    assert rate_grid(1, 8, ratio=2) == [1, 2, 4, 8]
    assert rate_grid(1, 7.9, ratio=2) == [1, 2, 4]
    assert rate_grid(0.5, 0.5, ratio=1.1) == [0.5]
    grid = rate_grid(0.5, 64, ratio=1.08)
    assert grid == sorted(set(grid)) and grid[0] == 0.5 and 60 < grid[-1] <= 64


@pytest.mark.parametrize(("lowest", "highest", "ratio"), [(0, 1, 2), (2, 1, 2), (1, 2, 1), (-1, 1, 2)])
def test_a_range_without_rates_is_refused(lowest: float, highest: float, ratio: float) -> None:
    with pytest.raises(ValueError, match="rates must be"):
        rate_grid(lowest, highest, ratio=ratio)
