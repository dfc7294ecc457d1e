"""How many tokens a request may make."""

from __future__ import annotations

from typing import Any

import pytest

from common.errors import OutOfRange
from router.fleet.capacity import group_pages, output_limit, pair_pages
from tests.helpers.workers import worker

pytestmark = pytest.mark.unit


def limit(prompt_len: int, max_tokens: int, *, given: bool = True, **changes: Any) -> int:
    deployment: dict[str, Any] = {"max_context": 100, "page_size": 4, "pool_pages": 10} | changes
    return output_limit(prompt_len=prompt_len, max_tokens=max_tokens, max_tokens_given=given, **deployment)


@pytest.mark.parametrize(("prompt_len", "max_tokens", "expected"), [(10, 20, 20), (10, 30, 30), (39, 1, 1), (1, 39, 39)])
def test_what_fits_is_kept(prompt_len: int, max_tokens: int, expected: int) -> None:
    assert limit(prompt_len, max_tokens) == expected


def test_what_the_context_does_not_leave_is_cut() -> None:
    assert limit(90, 50, pool_pages=1000) == 10
    assert limit(99, 50, pool_pages=1000, given=False) == 1


def test_a_given_max_tokens_beyond_the_pools_is_refused_naming_pages_cap_02() -> None:
    with pytest.raises(OutOfRange, match=r"max_tokens.*10 tokens.*10 pages of 4 tokens \(11 needed\), got 31"):
        limit(10, 31)


def test_the_default_is_cut_to_the_pools_and_a_prompt_that_leaves_nothing_is_refused() -> None:
    assert limit(10, 1024, given=False) == 30
    with pytest.raises(OutOfRange, match=r"10 pages of 4 tokens \(11 needed\)"):
        limit(40, 1024, given=False)


def test_the_cut_to_the_context_comes_before_the_pools() -> None:
    assert limit(10, 10_000, max_context=40) == 30


def test_a_group_needs_the_prompt_growth_and_copies() -> None:
    assert group_pages(prompt_len=9, n=1, page_size=4) == 4
    assert group_pages(prompt_len=9, n=3, page_size=4) == 3 + 3 + 2


def test_the_pools_are_those_of_the_best_pair_or_of_the_best_worker_that_is_one_alone() -> None:
    p, d = worker("p", "prefill", pages=50), worker("d", "decode", pages=80)
    small, large = worker("c1", "decode", pages=30, alone=True), worker("c2", "decode", pages=70, alone=True)
    assert pair_pages([p]) is None and pair_pages([d]) is None
    assert pair_pages([p, d]) == 50 and pair_pages([small]) == 30
    assert pair_pages([p, d, small]) == 50 and pair_pages([p, d, small, large]) == 70
    assert pair_pages([p, small]) == 30, "no prefill worker hands over to it"
