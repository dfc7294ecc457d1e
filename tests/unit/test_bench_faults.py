"""bench.faults: what timelines around a kill come to."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.faults import parse
from bench.faults_load import Outcome, Timeline


@pytest.fixture(autouse=True)
def every_answer_of_threes_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.helpers.reference.best", lambda model, prompt, output: [3] * len(output))


def timeline(*times: float, output: list[int] | None = None, attempts: int = 1, error: str = "") -> Timeline:
    return Timeline([1, 2], 2, list(times), [3, 3] if output is None else output, error, attempts)


def test_pauses_are_of_requests_under_way_at_the_kill_and_recovery_waits_for_one_sent_after_it() -> None:
    timelines = [
        timeline(0.0, 1.0, 2.0),  # over before it
        timeline(4.0, 4.9, 6.5, 6.6, attempts=2),
        timeline(4.0, 4.8, 5.2, 5.3),
        timeline(4.0, 4.5, 5.1, error="UNAVAILABLE: gone", output=[]),
        timeline(5.5, 8.0, 8.1),
    ]
    outcome = Outcome.of("name", timelines, killed=5.0, model=Path("unused"))
    assert (outcome.requests, outcome.failed, outcome.wrong, outcome.retried) == (5, ["UNAVAILABLE: gone"], 0, 1)
    assert outcome.pauses == pytest.approx([0.2, 1.5])
    assert (outcome.longest_pause, outcome.recovery) == pytest.approx((2.5, 3.0))


@pytest.mark.parametrize("output", [[3], [3, 4], [3, 3, 3]], ids=["short", "other", "long"])
def test_an_answer_that_is_not_the_expected_one_is_wrong(output: list[int]) -> None:
    outcome = Outcome.of("name", [timeline(6.0, 7.0, output=output)], killed=5.0, model=Path("unused"))
    assert outcome.wrong == 1


def test_a_row_has_as_many_cells_as_the_head() -> None:
    from bench.faults_load import HEAD

    row = Outcome.of("name", [timeline(6.0, 7.0)], killed=5.0, model=Path("unused")).row()
    assert {line.count("|") for line in (*HEAD.splitlines(), row)} == {11}
    assert "nan" not in row


@pytest.mark.parametrize(("flag", "value"), [("--requests", "2"), ("--requests", "-1"), ("--at-once", "0")])
def test_a_load_in_which_nothing_is_killed_or_sent_is_refused(flag: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse([flag, value])
    assert f"{flag} must be at least " in capsys.readouterr().err


@pytest.mark.parametrize("before", [[], [timeline(0.0, 1.0)]], ids=["nothing ended well", "only what came before did"])
def test_where_nothing_ends_well_after_the_kill_there_is_no_recovery(before: list[Timeline]) -> None:
    lost = [timeline(4.0, 5.1, error="UNAVAILABLE: gone", output=[]), timeline(6.0, 6.1, error="UNAVAILABLE: gone", output=[])]
    outcome = Outcome.of("name", [*before, *lost], killed=5.0, model=Path("unused"))
    assert outcome.recovery is None and outcome.row().endswith("| never |")
    assert len(outcome.failed) == 2 and outcome.pauses == []
