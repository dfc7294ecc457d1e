"""The simulated runner: it takes a step's time, says the simulated language, and notices a page that is not what it should be."""

from __future__ import annotations

import pytest

from common.core import Batch, Req, SamplingParams
from common.engine.sim.clock import CATCH_UP_SECONDS, SimClock
from common.engine.sim.pages import TAG_BYTES, SimPool, SimRows, Tag
from common.engine.sim.profile import SimProfile
from common.engine.sim.runner import SimRunner
from common.engine.sim.tokens import SimVocabulary, expected_output
from common.handoff.pool_memory import PoolMemory
from common.token_ids import plain_ids
from common.work import Compatibility

PAGE = 4
WORDS = SimVocabulary(50, frozenset({49}))
PROMPT = list(range(10))


class Bench:
    """A runner on a clock of its own."""

    def __init__(self) -> None:
        self.wall = 100.0
        self.clock = SimClock(wall=lambda: self.wall)
        memory = PoolMemory(16, TAG_BYTES)
        self.runner = SimRunner(
            compatibility=Compatibility("f", "simulated", PAGE, 64, num_layers=1, num_kv_heads=1, head_dim=1),
            vocabulary=WORDS,
            pool=SimPool(memory, page_size=PAGE),
            page_table=SimRows(4, page_size=PAGE),
            profile=SimProfile(),
            clock=self.clock,
        )

    def req(self, ids: list[int], pages: list[int], *, cached_len: int = 0, output_len: int = 8, prompt_len: int = -1) -> Req:
        row = self.runner.page_table.take_row()
        self.runner.page_table.assign(row, 0, pages)
        return Req(plain_ids(ids), row, cached_len, output_len, 0, SamplingParams(), None, prompt_len=prompt_len)

    def prefill(self, req: Req) -> list[int]:
        self.clock.begin_step(follows=False)
        (sampled,) = self.runner.run(Batch([req], "prefill"))
        req.complete_one()
        return [one.token_id for one in sampled]

    def decode(self, req: Req) -> int:
        self.clock.begin_step(follows=True)
        ((one,),) = self.runner.run(Batch([req], "decode"))
        req.complete_one()
        req.append_id(one.token_id)
        return one.token_id


def test_a_prompt_in_chunks_and_its_output_are_the_expected_ones() -> None:
    bench = Bench()
    req = bench.req(PROMPT, [3, 7, 1])
    req.take_chunk(6)
    assert bench.runner.run(Batch([req], "prefill")) == [[]]
    req.complete_chunk()
    req.take_chunk(100)
    first = bench.prefill(req)
    req.append_id(first[0])
    bench.runner.page_table.assign(req.table_idx, 3, [9, 2])
    assert [*first, *(bench.decode(req) for _ in range(6))] == expected_output(PROMPT, 7, vocabulary=WORDS)
    assert bench.runner.pool.read(7) == Tag(4, 4, bench.runner.pool.read(7).chain)


def test_pages_that_were_handed_over_are_read_before_the_first_step() -> None:
    bench = Bench()
    first = bench.prefill(bench.req(PROMPT, [3, 7, 1]))
    for source, target in ((3, 10), (7, 11), (1, 12)):
        bench.runner.pool.copy_page(source, target)
    taken_over = bench.req([*PROMPT, *first], [10, 11, 12], cached_len=10, prompt_len=10)
    assert bench.decode(taken_over) == expected_output(PROMPT, 2, vocabulary=WORDS)[1]


@pytest.mark.parametrize("pages", [[10, 12, 11], [10, 11, 11], [10, 11, 13]], ids=["swapped", "doubled", "not sent"])
def test_a_page_that_is_not_the_one_that_was_meant_is_noticed(pages: list[int]) -> None:
    bench = Bench()
    first = bench.prefill(bench.req(PROMPT, [10, 11, 12]))
    with pytest.raises(AssertionError, match=r"page 1[123] of .* holds .*, should hold"):
        bench.decode(bench.req([*PROMPT, *first], pages, cached_len=10))


def test_a_write_into_a_running_requests_page_is_noticed() -> None:
    bench = Bench()
    req = bench.req(PROMPT, [0, 1, 2])
    req.append_id(bench.prefill(req)[0])
    bench.runner.pool.write(2, Tag(8, 2, 12345))
    with pytest.raises(AssertionError, match="page 2 of"):
        bench.decode(req)


def test_a_step_takes_its_time_and_the_next_one_begins_when_it_ends() -> None:
    bench = Bench()
    profile, req = SimProfile(), bench.req(PROMPT, [3, 7, 1, 2])
    req.append_id(bench.prefill(req)[0])
    ended = 100.0 + profile.prefill_seconds([(0, 10)])
    assert bench.clock.busy_until == pytest.approx(ended) and bench.clock.now() == bench.clock.busy_until
    bench.wall = ended + CATCH_UP_SECONDS / 2  # The timer was late: time is not lost by it.
    bench.decode(req)
    assert bench.clock.busy_until == pytest.approx(ended + profile.decode_seconds([11]))
    assert bench.clock.lag_seconds == 0.0
    bench.wall = bench.clock.busy_until + 2 * CATCH_UP_SECONDS  # So late that it is.
    bench.decode(req)
    assert bench.clock.busy_until == pytest.approx(bench.wall + profile.decode_seconds([12]))
    assert bench.clock.lag_seconds == pytest.approx(2 * CATCH_UP_SECONDS)


def test_the_scale_and_a_slow_worker_change_how_long_a_step_takes() -> None:
    clock = SimClock(time_scale=10.0, wall=lambda: 0.0)
    clock.begin_step(follows=False)
    clock.spend(1.0)
    assert clock.busy_until == pytest.approx(0.1) and clock.is_busy
    clock.slowness = 3.0
    assert clock.wall_seconds(1.0) == pytest.approx(0.3)
