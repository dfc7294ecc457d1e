"""Rendezvous hashing with bounded loads, and the policies made of it: what must hold for any workers, keys and loads."""

from __future__ import annotations

from array import array
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.fleet.placement import Ask, seats_for
from router.fleet.policies import POLICIES, Placer, PolicyName
from router.fleet.policies.rendezvous import BALANCE, home_of, within
from router.fleet.prefix_map import PrefixMap
from router.fleet.prompt_blocks import PromptBlocks, block_tokens
from router.fleet.workers import Worker
from tests.helpers.workers import worker

pytestmark = pytest.mark.unit

names = st.lists(st.text(min_size=1, max_size=12), min_size=1, max_size=12, unique=True)
keys = st.binary(max_size=40)
LEVEL = {"added": 0.0, "floor": 0.0}


@settings(deadline=None)
@given(names, st.lists(keys, max_size=20), st.data())
def test_a_worker_that_leaves_moves_only_its_own_keys(ids: list[str], some: list[bytes], data: st.DataObject) -> None:
    gone = data.draw(st.sampled_from(ids))
    left = dict.fromkeys((name for name in ids if name != gone), 0.0)
    before = {key: home_of(key, dict.fromkeys(ids, 0.0), **LEVEL) for key in some}
    for key, home in before.items():
        if home != gone and left:
            assert home_of(key, left, **LEVEL) == home


@settings(deadline=None)
@given(names, st.lists(keys, max_size=20), st.text(min_size=1, max_size=12))
def test_a_worker_that_joins_takes_keys_and_moves_no_others(ids: list[str], some: list[bytes], new: str) -> None:
    for key in some:
        before = home_of(key, dict.fromkeys(ids, 0.0), **LEVEL)
        assert home_of(key, dict.fromkeys([*ids, new], 0.0), **LEVEL) in (before, new)


@settings(deadline=None)
@given(names, keys, st.data())
def test_agreement_does_not_depend_on_the_order_in_which_workers_came(ids: list[str], key: bytes, data: st.DataObject) -> None:
    loads = {name: data.draw(st.floats(0, 1e6)) for name in ids}
    other = {name: loads[name] for name in data.draw(st.permutations(ids))}
    assert home_of(key, loads, added=1, floor=0) == home_of(key, other, added=1, floor=0)


@settings(deadline=None)
@given(names, st.lists(st.tuples(keys, st.integers(1, 5000)), max_size=60), st.integers(0, 3000))
def test_the_bound_is_never_exceeded_by_more_than_the_last_one_put_there(
    ids: list[str], items: list[tuple[bytes, int]], floor: int
) -> None:
    loads = dict.fromkeys(ids, 0.0)
    for key, size in items:
        home = home_of(key, loads, added=size, floor=floor)
        assert loads[home] <= max(floor, BALANCE * (sum(loads.values()) + size) / len(ids))
        loads[home] += size
    largest = max((size for _, size in items), default=0)
    assert max(loads.values()) <= max(floor, BALANCE * sum(loads.values()) / len(ids)) + largest


@settings(deadline=None)
@given(st.dictionaries(st.text(), st.floats(0, 1e9), min_size=1), st.floats(0, 1e6), st.floats(0, 1e6))
def test_somebody_is_always_within_the_bound(loads: dict[str, float], added: float, floor: float) -> None:
    assert min(loads, key=lambda name: loads[name]) in within(loads, added=added, floor=floor)


def test_keys_spread_evenly() -> None:
    loads = dict.fromkeys((f"prefill-{i:08x}" for i in range(8)), 0.0)
    counts = Counter(home_of(str(i).encode(), loads, **LEVEL) for i in range(4000))
    assert len(counts) == 8 and max(counts.values()) < 1.2 * 500 and min(counts.values()) > 0.8 * 500


def two_views(loads: list[int]) -> tuple[list[Worker], list[Worker]]:
    """The same cluster as two routers have learnt of it: in another order."""

    def view() -> list[Worker]:
        made = [worker(f"p{i}", "prefill", queued_tokens=tokens, pages=10_000) for i, tokens in enumerate(loads)]
        return [*made, *(worker(f"d{i}", "decode", running=tokens % 8, pages=10_000) for i, tokens in enumerate(loads))]

    return view(), view()[::-1]


@settings(deadline=None)
@given(
    st.sampled_from(["least_load", "prefix", "session"]),
    st.lists(st.integers(0, 20_000), min_size=1, max_size=8),
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 900)), min_size=1, max_size=6),
)
def test_two_routers_that_see_the_same_loads_agree(name: PolicyName, loads: list[int], asks: list[tuple[int, int]]) -> None:
    ours, theirs = two_views(loads)
    for kind, length in asks:
        ask = Ask(1, prompt=PromptBlocks(array("i", [kind, *range(length)])), session=str(kind))
        here, there = seats_for(ours, ask), seats_for(theirs, ask)
        assert here is not None and there is not None
        # Neither knows what the other has sent.
        assert Placer(name, seed=1).choose(here, ask).ids == Placer(name, seed=2).choose(there, ask).ids


@settings(deadline=None)
@given(st.sampled_from(["prefix", "session"]), st.lists(st.tuples(st.integers(0, 2), st.integers(65, 4000)), max_size=40))
def test_one_popular_key_does_not_sink_its_worker(name: PolicyName, items: list[tuple[int, int]]) -> None:
    workers = [worker(f"p{i}", "prefill", pages=100_000) for i in range(4)]
    placer, total = Placer(name, seed=0), 0
    for kind, length in items:
        ask = Ask(1, needs_decode=False, prompt=PromptBlocks(array("i", [kind, *range(length - 1)])), session=str(kind))
        seats = seats_for(workers, ask)
        assert seats is not None
        pair = placer.choose(seats, ask)
        placer.took(pair, ask)
        first = pair.prefill
        total += length
        assert first.queued_tokens <= max(2048, BALANCE * total / 4)
        first.tokens.begin(length)


@settings(deadline=None)
@given(st.lists(st.integers(0, 3), max_size=200), st.lists(st.integers(0, 3), max_size=200), st.sampled_from([4, 16, 64, 100]))
def test_blocks_are_equal_exactly_as_far_as_prompts_are(one: list[int], other: list[int], page_size: int) -> None:
    tokens = block_tokens(page_size)
    assert tokens % page_size == 0
    a, b = PromptBlocks(array("i", one)).names(tokens=tokens), PromptBlocks(array("i", other)).names(tokens=tokens)
    assert len(a) == max(0, len(one) - 1) // tokens, "the last token is always computed"
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        assert (x == y) is (one[: (i + 1) * tokens] == other[: (i + 1) * tokens])


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), max_size=30), st.integers(1, 8))
def test_a_prefix_map_keeps_whole_prefixes_within_its_capacity(prompts: list[list[int]], capacity: int) -> None:
    known = PrefixMap()
    for ids in prompts:
        blocks = PromptBlocks(array("i", [*ids, 9])).names(tokens=1)
        known.note("w", blocks, capacity=capacity)
        assert known.matched("w", blocks) == min(len(blocks), capacity)
        assert len(known) <= capacity and known.matched("other", blocks) == 0
    for ids in prompts:
        blocks = PromptBlocks(array("i", [*ids, 9])).names(tokens=1)
        length = known.matched("w", blocks)
        assert all(known.matched("w", blocks[: i + 1]) == i + 1 for i in range(length))
        assert all(known.matched("w", blocks[:i]) <= length for i in range(len(blocks)))


def test_every_policy_is_offered() -> None:
    assert set(POLICIES) == {"least_load", "power_of_two", "round_robin", "prefix", "session"}
