"""Policies as functions of values: which of the workers that can take a request gets it."""

from __future__ import annotations

from array import array
from collections import Counter
from typing import Any

import pytest

from common.work import WorkerLoad
from router.fleet.placement import Ask, seats_for
from router.fleet.policies import POLICIES, Placer
from router.fleet.policies.least_load import least_load
from router.fleet.policies.power_of_two import after_draws, power_of_two
from router.fleet.policies.prefix import after_prefix, prefix
from router.fleet.policies.round_robin import Turn, after_turn, round_robin
from router.fleet.policies.session import session
from router.fleet.prefix_map import PrefixMap
from router.fleet.prompt_blocks import PromptBlocks
from router.fleet.workers import Worker
from tests.helpers.workers import worker

pytestmark = pytest.mark.unit


def chosen(policy: Any, workers: list[Worker], ask: Ask | None = None, state: Any = None) -> tuple[tuple[str, str], Any]:
    ask = ask or Ask(1)
    seats = seats_for(workers, ask)
    assert seats is not None
    pair = policy(seats, ask, state)
    after: Any = {power_of_two: after_draws, round_robin: after_turn, prefix: after_prefix}.get(policy)
    return (pair.prefill.id, pair.decode.id if pair.decode else ""), after(pair, ask, state) if after else state


def give(made: Worker, *, requests: int = 0, tokens: int = 0) -> None:
    """Work that the router has sent since the last report."""
    made.tokens.begin(tokens)
    made.completions.begin(requests)


def prompt(*ids: int, length: int = 640) -> PromptBlocks:
    """ids, and then a rest that is the same for all."""
    return PromptBlocks(array("i", [*ids, *range(length)][:length]))


def prefills(n: int, **load: Any) -> list[Worker]:
    return [worker(f"p{i}", "prefill", **load) for i in range(n)]


class TestEveryPolicy:
    @pytest.mark.parametrize("name", POLICIES)
    @pytest.mark.parametrize("needs_decode", [True, False])
    def test_takes_a_worker_that_is_a_pair_alone_for_one(self, name: Any, needs_decode: bool) -> None:
        ask = Ask(1, needs_decode=needs_decode, prompt=prompt(), session="s")
        placer = Placer(name, seed=1)
        seats = seats_for([worker("c", "decode", alone=True)], ask)
        assert seats is not None
        pair = placer.choose(seats, ask)
        assert (pair.prefill.id, pair.decode and pair.decode.id) == ("c", "c" if needs_decode else None)

    @pytest.mark.parametrize("name", POLICIES)
    def test_goes_on_when_workers_come_and_go(self, name: Any) -> None:
        placer, workers = (
            Placer(name, seed=1),
            [worker("p0", "prefill"), worker("d0", "decode"), worker("c0", "decode", alone=True)],
        )
        for i in range(1, 30):
            ask = Ask(1, needs_decode=i % 3 > 0, prompt=prompt(i % 4), session=str(i % 5))
            seats = seats_for(workers, ask)
            assert seats is not None
            pair = placer.choose(seats, ask)
            placer.took(pair, ask)
            assert pair.prefill in seats.firsts and (pair.decode is None) is not ask.needs_decode
            assert pair.decode is None or pair.is_alone is pair.prefill.profile.local_prefill
            if i % 2:
                gone = workers.pop(0)
                placer.left(gone.id)
            workers.append([worker(f"p{i}", "prefill"), worker(f"d{i}", "decode"), worker(f"c{i}", "decode", alone=True)][i % 3])
            if i % 7 == 0:
                placer.flushed()


class TestLeastLoad:
    def test_the_fewest_queued_tokens_and_the_fewest_requests_win(self) -> None:
        p1, p2 = worker("p1", "prefill", queued_tokens=500), worker("p2", "prefill", queued_tokens=100, waiting=9)
        d1, d2 = worker("d1", "decode", running=3), worker("d2", "decode", running=2)
        assert chosen(least_load, [p1, p2, d1, d2])[0] == ("p2", "d2")

    def test_equal_requests_go_to_more_free_pages_and_full_ties_to_the_first_id(self) -> None:
        p = worker("p", "prefill")
        assert chosen(least_load, [p, worker("d1", "decode", free=10), worker("d2", "decode", free=20)])[0] == ("p", "d2")
        assert chosen(least_load, [p, worker("d2", "decode"), worker("d1", "decode")])[0] == ("p", "d1")

    def test_a_larger_batch_takes_more_requests(self) -> None:
        small, large = worker("d1", "decode", running=2, max_running=4), worker("d2", "decode", running=3, max_running=64)
        assert chosen(least_load, [worker("p", "prefill"), small, large])[0] == ("p", "d2")

    def test_a_few_requests_that_fill_the_pool_are_more_than_many_small_ones(self) -> None:
        long, short = worker("d1", "decode", running=1, free=5), worker("d2", "decode", running=4, free=90)
        assert chosen(least_load, [worker("p", "prefill"), long, short])[0] == ("p", "d2")

    def test_the_less_loaded_of_workers_that_are_pairs_alone_is_chosen(self) -> None:
        c1, c2 = worker("c1", "decode", alone=True, running=3), worker("c2", "decode", alone=True, running=2)
        assert chosen(least_load, [c1, c2])[0] == ("c2", "c2")
        assert chosen(least_load, [c1, c2], Ask(1, needs_decode=False))[0] == ("c2", "")
        assert chosen(least_load, [c1, c2], Ask(1, avoid=frozenset({"c2"})))[0] == ("c1", "c1")
        c1.report(WorkerLoad(running=2, pages=c1.load.pages))
        give(c2, requests=0, tokens=900)
        assert chosen(least_load, [c1, c2])[0] == ("c1", "c1")

    def test_a_pair_of_two_and_a_worker_alone_compete_by_load_and_the_two_win_a_tie(self) -> None:
        p, d, c = worker("p", "prefill"), worker("d", "decode"), worker("c", "decode", alone=True)
        assert chosen(least_load, [p, d, c])[0] == ("p", "d")
        give(d, requests=1, tokens=0)
        assert chosen(least_load, [p, d, c])[0] == ("c", "c")
        give(c, requests=2, tokens=10)
        assert chosen(least_load, [p, d, c])[0] == ("p", "d")
        give(p, requests=1, tokens=50)
        assert chosen(least_load, [p, d, c], Ask(1, needs_decode=False))[0] == ("c", "")


class TestPowerOfTwo:
    def test_the_most_loaded_of_several_is_never_chosen_and_every_other_one_is(self) -> None:
        workers = [*prefills(4), worker("p9", "prefill", queued_tokens=10), worker("d", "decode")]
        state, counts = 7, Counter[str]()
        for _ in range(400):
            (first, _), state = chosen(power_of_two, workers, state=state)
            counts[first] += 1
        assert "p9" not in counts and len(counts) == 4
        # Ties within a pair go by id: of four equal ones p0 wins whenever it is drawn, p2 only against p3.
        assert counts["p0"] > counts["p1"] > counts["p2"] > counts["p3"] > 0

    def test_two_draws_are_of_two_workers(self) -> None:
        workers, state = [worker("p0", "prefill", queued_tokens=1), worker("p1", "prefill"), worker("d", "decode")], 3
        for _ in range(50):
            (first, _), state = chosen(power_of_two, workers, state=state)
            assert first == "p1"

    def test_loads_stay_even(self) -> None:
        workers, state = [*prefills(10), worker("d", "decode", max_running=10_000)], 1
        for _ in range(1000):
            (first, _), state = chosen(power_of_two, workers, state=state)
            give(workers[int(first[1:])], requests=1, tokens=1)
        loads = [made.queued_tokens for made in workers[:10]]
        # log log n above the mean with two choices; one choice alone would leave about 30 apart.
        assert max(loads) - min(loads) <= 8

    def test_the_same_seed_gives_the_same_choices(self) -> None:
        workers = [*prefills(5), worker("d", "decode")]
        assert [chosen(power_of_two, workers, state=5) for _ in range(3)] == [chosen(power_of_two, workers, state=5)] * 3


class TestRoundRobin:
    def test_each_side_takes_turns_by_itself(self) -> None:
        workers = [*prefills(3), worker("d0", "decode"), worker("d1", "decode")]
        turns, state = [], Turn()
        for _ in range(6):
            pair, state = chosen(round_robin, workers, state=state)
            turns.append(pair)
        assert turns == [("p0", "d0"), ("p1", "d1"), ("p2", "d0"), ("p0", "d1"), ("p1", "d0"), ("p2", "d1")]

    def test_the_turn_goes_on_where_it_was_when_the_last_one_has_gone(self) -> None:
        workers = [*prefills(4), worker("d", "decode")]
        (first, _), state = chosen(round_robin, workers, state=Turn("p1", "d"))
        assert first == "p2"
        (first, _), state = chosen(round_robin, [workers[0], workers[3], workers[4]], state=state)
        assert first == "p3"
        (first, _), state = chosen(round_robin, workers, state=state)
        assert first == "p0"


class TestSession:
    def test_a_session_stays_with_its_workers_and_sessions_spread(self) -> None:
        workers = [*prefills(4), *(worker(f"d{i}", "decode") for i in range(4))]
        homes = {name: chosen(session, workers, Ask(1, session=name))[0] for name in map(str, range(100))}
        assert len({first for first, _ in homes.values()}) == len({decode for _, decode in homes.values()}) == 4
        for made in workers:
            give(made, requests=1, tokens=100)
        assert homes == {name: chosen(session, workers, Ask(1, session=name))[0] for name in homes}

    def test_a_home_that_is_loaded_beyond_the_others_is_left(self) -> None:
        workers = [*prefills(3), worker("d", "decode")]
        ask = Ask(1, session="s")
        (home, _), _ = chosen(session, workers, ask)
        give(workers[int(home[1:])], requests=0, tokens=5000)
        (away, _), _ = chosen(session, workers, ask)
        assert away != home
        for made in workers[:3]:
            made.report(WorkerLoad(queued_tokens=5000, pages=made.load.pages))
        assert chosen(session, workers, ask)[0][0] == home, "loaded like the others it is home again"

    def test_without_a_session_the_least_loaded_are_chosen(self) -> None:
        workers = [worker("p0", "prefill", queued_tokens=1), worker("p1", "prefill"), worker("d", "decode")]
        assert chosen(session, workers)[0] == ("p1", "d")


class TestPrefix:
    def test_equal_prefixes_meet_and_different_ones_spread(self) -> None:
        workers = [*prefills(4), worker("d", "decode")]
        homes: dict[int, str] = {}
        known = PrefixMap()
        for i in range(40):
            (homes[i], _), known = chosen(prefix, workers, Ask(1, prompt=prompt(i)), known)
        assert len(set(homes.values())) == 4
        for i, home in homes.items():
            assert chosen(prefix, workers, Ask(1, prompt=prompt(i, length=2000)), known)[0][0] == home

    def test_a_longer_match_is_worth_the_tokens_it_saves_and_no_more(self) -> None:
        p0, p1, d = worker("p0", "prefill"), worker("p1", "prefill"), worker("d", "decode")
        ask = Ask(1, prompt=prompt(length=1281))
        (home, _), known = chosen(prefix, [p0, p1, d], ask, PrefixMap())
        holder = p0 if home == "p0" else p1
        give(holder, requests=0, tokens=1279)
        assert chosen(prefix, [p0, p1, d], ask, known)[0][0] == home, "1280 cached, 1279 in line"
        give(holder, requests=0, tokens=2)
        assert chosen(prefix, [p0, p1, d], ask, known)[0][0] != home

    def test_a_worker_beyond_the_bound_gets_none_however_much_it_has_cached(self) -> None:
        workers = [*prefills(4), worker("d", "decode")]
        ask = Ask(1, prompt=prompt(length=3000))
        (home, _), known = chosen(prefix, workers, ask, PrefixMap())
        give(workers[int(home[1:])], requests=0, tokens=2500)
        assert chosen(prefix, workers, ask, known)[0][0] != home

    def test_a_prompt_without_a_whole_block_goes_by_load(self) -> None:
        p0, p1, d = worker("p0", "prefill", queued_tokens=9), worker("p1", "prefill"), worker("d", "decode")
        pair, known = chosen(prefix, [p0, p1, d], Ask(1, prompt=prompt(length=64)), PrefixMap())
        assert pair == ("p1", "d") and len(known) == 0

    def test_decode_workers_are_chosen_by_load(self) -> None:
        workers = [worker("p", "prefill"), worker("d0", "decode", running=1), worker("d1", "decode")]
        assert chosen(prefix, workers, Ask(1, prompt=prompt()), PrefixMap())[0] == ("p", "d1")

    def test_a_worker_that_left_is_forgotten_and_a_flush_forgets_all(self) -> None:
        placer, ask = Placer("prefix", seed=0), Ask(1, prompt=prompt())
        workers = [*prefills(2), worker("d", "decode")]
        seats = seats_for(workers, ask)
        assert seats is not None
        pair = placer.choose(seats, ask)
        placer.took(pair, ask)
        home = pair.prefill
        give(home, requests=0, tokens=300)
        assert placer.choose(seats, ask).prefill is home, "640 tokens are known to be there"
        placer.flushed()
        assert placer.choose(seats, ask).prefill is not home, "only one block of a home is hoped for"
