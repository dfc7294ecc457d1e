"""What a fleet is told to do: orders as text, and faults that the same seed repeats."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bench.fleet.__main__ import take_orders
from bench.fleet.faults import Faults
from bench.fleet.fleet import Fleet, Plan
from bench.fleet.orders import Order
from bench.fleet.spells import Spells

NAMES = Plan(model=Path("m"), router="r", prefill=3, decode=2).names


def test_members_are_named_by_role_and_number() -> None:
    assert NAMES == ["prefill-0", "prefill-1", "prefill-2", "decode-0", "decode-1"]


@pytest.mark.parametrize("line", ["kill decode-3", "pause prefill-0 0.25", "slow decode-0 4 0.5", "fail prefill-2 0.3 2", "stat"])
def test_an_order_reads_back_as_it_was_written(line: str) -> None:
    assert str(Order.parse(line + "\n")) == line


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "an order must be stat or one of kill, stop, pause, slow, fail with a name and its numbers, got ''"),
        ("kill", "an order must be stat or one of .*, got 'kill'"),
        ("kill decode-0 1", "an order must be stat or one of .*, got 'kill decode-0 1'"),
        ("drown decode-0", "an order must be stat or one of .*, got 'drown decode-0'"),
        ("pause decode-0 long", "what follows the name must be numbers, got 'pause decode-0 long'"),
        ("slow decode-0 -1 2", "the numbers must be at least 0, got 'slow decode-0 -1 2'"),
    ],
)
def test_what_is_no_order_says_what_one_is(line: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Order.parse(line)


def test_the_same_seed_hurts_the_same_members_in_the_same_ways() -> None:
    first, again, other = (Faults(NAMES, seed=seed) for seed in (1, 1, 2))
    orders = [first.next() for _ in range(200)]
    assert orders == [again.next() for _ in range(200)] != [other.next() for _ in range(200)]
    assert {order.what for order in orders} == {"kill", "pause", "slow", "fail"}
    assert {order.name for order in orders} == set(NAMES)
    assert all(order.name.startswith("prefill") for order in orders if order.what == "fail"), "who sends nothing cannot fail to"
    assert all(Order.parse(str(order)).what == order.what for order in orders)


async def test_an_empty_line_is_no_order_and_no_end_of_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Orders:
        taken: list[str] = []

        async def order(self, line: str) -> None:
            self.taken.append(line)

    reading, writing = os.pipe()
    os.write(writing, b"kill decode-0\n\nstop decode-1\n")
    os.close(writing)
    fleet: Any = Orders()
    with os.fdopen(reading) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        await take_orders(fleet)
    assert fleet.taken == ["kill decode-0", "stop decode-1"]
    assert "error: an order must be stat or one of " in capsys.readouterr().out


async def test_of_faults_that_overlap_the_worst_counts_until_its_own_end() -> None:
    degrees: list[float] = []
    spells = Spells(degrees.append, well=1.0)
    long = asyncio.create_task(spells.last(2.0, 60.0))
    await asyncio.sleep(0)
    await spells.last(5.0, 0.001)
    await spells.last(1.5, 0.001)
    long.cancel()
    await asyncio.wait([long])
    assert degrees == [2.0, 5.0, 2.0, 2.0, 2.0, 1.0]


LATE = """
import sys
def say(text): print(text, flush=True)
say('{"event": "ready", "pid": 1}')
for number, line in enumerate(sys.stdin):
    if number:
        for answer in range(2 if number == 1 else 1):
            say('{"event": "stat", "question": %d}' % number)
"""
"""A process of a fleet that answers its first question with the second."""


class LatePlan(Plan):
    def command(self, names: Sequence[str], seed: int) -> list[str]:
        return [sys.executable, "-c", LATE]


async def test_an_answer_that_comes_after_its_question_was_given_up_harms_nobody(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async with Fleet(LatePlan(model=Path("m"), router="r"), log=tmp_path / "log") as fleet:
        with monkeypatch.context() as patch:
            patch.setattr("bench.fleet.fleet.ANSWER_SECONDS", 0.01)
            with pytest.raises(TimeoutError):
                await fleet.stats()
        assert await fleet.stats() == [{"question": 1}]
        assert (await fleet.stats())[0]["question"] in (1, 2), "the double is old news at worst"
        assert len(await fleet.stats()) == 1, "it is followed still"
