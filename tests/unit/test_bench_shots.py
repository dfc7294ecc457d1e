"""The serving benchmark's loads: arrivals, lengths and traces are functions of the seed."""

from __future__ import annotations

import random
import statistics
from pathlib import Path

import pytest

from bench.serving.lengths import Lengths
from bench.serving.shots import Shot, Window, at_once, dealt, open_loop, poisson, read_trace, streams

FIXED, RANGE = Lengths.parse("8"), Lengths.parse("100-1024")


def test_arrivals_come_at_the_rate_asked_for_and_independently() -> None:
    times = list(poisson(50, until=200, rng=random.Random(1)))
    gaps = [after - before for before, after in zip(times, times[1:], strict=False)]
    assert times == sorted(times) and times[0] > 0 and times[-1] < 200
    assert len(times) == pytest.approx(10_000, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(statistics.mean(gaps), rel=0.05), "exponential: deviation equals mean"


def test_what_arrives_before_and_after_the_window_is_not_measured() -> None:
    shots = open_loop(20, Window(warmup=2, seconds=10, tail=3), inputs=RANGE, outputs=FIXED, seed=0)
    assert {shot.kind for shot in shots if shot.at < 2} == {"warm"}
    assert {shot.kind for shot in shots if 2 <= shot.at < 12} == {"measured"}
    assert {shot.kind for shot in shots if shot.at >= 12} == {"tail"}
    assert max(shot.at for shot in shots) < 15


def test_the_same_seed_gives_the_same_load_and_another_one_another() -> None:
    def load(seed: int) -> list[Shot]:
        return open_loop(5, Window(1, 5), inputs=RANGE, outputs=RANGE, seed=seed)

    assert load(3) == load(3) != load(4)
    assert at_once(9, inputs=RANGE, outputs=RANGE, seed=0) == at_once(9, inputs=RANGE, outputs=RANGE, seed=0)


def test_a_closed_load_is_all_there_at_once_and_streams_are_never_measured() -> None:
    assert {(shot.at, shot.kind) for shot in at_once(256, inputs=RANGE, outputs=RANGE, seed=0)} == {(0.0, "measured")}
    assert {shot.kind for shot in streams(64, inputs=FIXED, outputs=FIXED, seed=0)} == {"stream"}


@pytest.mark.parametrize(
    ("text", "low", "high", "median"),
    [("2048", 2048, 2048, 2048), ("100-1024", 100, 1024, 562), ("lognormal:512,0.8,4096", 1, 4096, 512)],
)
def test_lengths_follow_their_distribution(text: str, low: int, high: int, median: int) -> None:
    lengths, rng = Lengths.parse(text), random.Random(0)
    drawn = [lengths.draw(rng) for _ in range(4000)]
    assert low <= min(drawn) <= max(drawn) <= high
    assert statistics.median(drawn) == pytest.approx(median, rel=0.1)
    assert str(lengths) == text


@pytest.mark.parametrize("text", ["", "0", "5-3", "-3", "a", "lognormal:5", "lognormal:5,1,3", "10-", "1.5"])
def test_what_is_no_distribution_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="lengths must be like"):
        Lengths.parse(text)


def test_a_trace_is_sent_as_it_says(tmp_path: Path) -> None:
    (tmp_path / "trace").write_text('{"at": 1.5, "input": 10, "output": 2}\n\n{"at": 0, "input": 7, "output": 3}\n')
    assert read_trace(tmp_path / "trace") == [Shot(0, 7, 3), Shot(1.5, 10, 2)]
    assert [shot.kind for shot in read_trace(tmp_path / "trace", Window(1, 5))] == ["warm", "measured"]


@pytest.mark.parametrize("line", ["x", "{}", '{"at": -1, "input": 1, "output": 1}', '{"at": 1, "input": 0, "output": 1}', "[]"])
def test_a_trace_that_cannot_be_read_names_the_line(line: str, tmp_path: Path) -> None:
    (tmp_path / "trace").write_text('{"at": 0, "input": 1, "output": 1}\n' + line + "\n")
    with pytest.raises(ValueError, match=r"trace:2: "):
        read_trace(tmp_path / "trace")


def test_shots_are_dealt_in_turn_and_none_is_lost() -> None:
    shots = at_once(10, inputs=RANGE, outputs=RANGE, seed=0)
    hands = dealt(shots, 3)
    assert [len(hand) for hand in hands] == [4, 3, 3]
    assert sorted(map(repr, (shot for hand in hands for shot in hand))) == sorted(map(repr, shots))
