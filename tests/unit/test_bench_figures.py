"""What the serving benchmark makes of records: percentiles, objectives, tables, and whether the client was the limit."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from bench.serve import finite
from bench.serving.bench import Measured
from bench.serving.clients import Health
from bench.serving.figures import Figures, Slo, all_hold, percentile
from bench.serving.modes import Goodput, sweep
from bench.serving.records import Record
from bench.serving.shots import Window
from bench.serving.table import goodput_table, limits, load_table, render

FINE = Health(clients=1, lateness=0.001, lag=0.001, cpu_share=0.2)


def record(at: float, *times: float, counts: list[int] | None = None, **more: Any) -> Record:
    """A request sent on time whose deltas came at these times."""
    counts = counts or [1] * len(times)
    values: dict[str, Any] = {"kind": "measured", "at": at, "sent": at, "ended": times[-1] if times else at, "error": ""}
    return Record(**(values | {"input_tokens": 10, "asked_tokens": sum(counts), "times": list(times), "counts": counts} | more))


@pytest.mark.parametrize(("percent", "value"), [(50, 5), (90, 9), (99, 10), (100, 10), (10, 1), (1, 1)])
def test_a_percentile_is_a_value_that_was_measured(percent: float, value: float) -> None:
    assert percentile([float(n) for n in range(1, 11)], percent) == value


def test_a_percentile_of_nothing_is_nan_and_infinity_stays_at_the_end() -> None:
    assert math.isnan(percentile([], 50))
    assert (percentile([1.0, math.inf], 50), percentile([1.0, math.inf], 90)) == (1.0, math.inf)


def test_times_count_from_when_a_request_was_to_be_sent() -> None:
    seen = record(1.0, 1.5, 1.6, 1.8, sent=1.2)
    assert (seen.ttft, seen.end_to_end, seen.mean_gap) == pytest.approx((0.5, 0.8, 0.15))
    assert list(seen.gaps()) == pytest.approx([0.1, 0.2])
    assert list(seen.gaps(1.7, 9)) == pytest.approx([0.2])


def test_tokens_of_one_delta_came_together() -> None:
    assert list(record(0, 1.0, 1.3, counts=[2, 3]).gaps()) == pytest.approx([0, 0.3, 0, 0])


def test_only_measured_requests_make_figures_but_every_token_of_the_window_counts() -> None:
    records = [
        record(0.5, 1.0, 1.2, kind="warm"),
        record(1.0, 1.1, 1.3),
        record(1.5, 1.9, 2.5),
        record(2.1, 2.2, kind="tail"),
    ]
    figures = Figures.of(records, Window(warmup=1, seconds=1))
    assert (figures.requests, figures.output_tokens, figures.output_rate) == (2, 5, 5.0)
    assert [figures.at("ttft", percent) for percent in (50, 100)] == pytest.approx([0.1, 0.4])


def test_without_a_window_rates_span_the_first_sent_to_the_last_ended() -> None:
    figures = Figures.of([record(0, 1.0, 2.0), record(0, 1.0, 4.0)], None)
    assert (figures.seconds, figures.output_tokens, figures.output_rate) == (4.0, 4, 1.0)


def test_a_failed_request_was_infinitely_slow_and_is_counted_by_its_status() -> None:
    figures = Figures.of([record(0, 1.0, 2.0), record(0, 0.1, 0.2, error="UNAVAILABLE")], None)
    assert figures.failed == {"UNAVAILABLE": 1}
    assert (figures.at("ttft", 50), figures.at("ttft", 90), figures.at("e2e", 99)) == (1.0, math.inf, math.inf)
    assert figures.as_dict()["ms"]["ttft"] == {"p50": 1000.0, "p90": None, "p99": None, "max": None}


@pytest.mark.parametrize(
    ("text", "metric", "percent", "limit"),
    [("ttft:p90:400ms", "ttft", 90, 0.4), ("gap:p99.9:12ms", "gap", 99.9, 0.012), ("e2e:max:2s", "e2e", 100, 2)],
)
def test_an_objective_is_metric_percentile_and_limit(text: str, metric: str, percent: float, limit: float) -> None:
    slo = Slo.parse(text)
    assert (slo.metric, slo.percent) == (metric, percent)
    assert slo.limit == pytest.approx(limit)
    assert Slo.parse(str(Slo.parse(text))) == Slo.parse(text)


@pytest.mark.parametrize("text", ["ttft:400ms", "speed:p90:1ms", "ttft:p0:1ms", "ttft:p101:1ms", "ttft:p90:400", ""])
def test_what_is_no_objective_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="an objective"):
        Slo.parse(text)


def test_objectives_hold_at_their_limit_and_not_with_many_failures() -> None:
    fine = Figures.of([record(0, 0.5, 0.51)] * 100, None)
    assert all_hold([Slo("ttft", 90, 0.5)], fine)
    assert not all_hold([Slo("ttft", 90, 0.5), Slo("gap", 99, 0.005)], fine)
    assert all_hold([Slo("gap", 99, 0.1)], Figures.of([record(0, 0.5)], None)), "one token each: there is no gap to be too long"
    one_failed, two_failed = ([record(0, 0.5)] * (100 - n) + [record(0, error="X")] * n for n in (1, 2))
    assert all_hold([Slo("ttft", 90, 0.5)], Figures.of(one_failed, None))
    assert not all_hold([Slo("ttft", 90, 0.5)], Figures.of(two_failed, None))
    assert not all_hold([], Figures.of([], None)), "nothing measured"


def test_a_sweep_puts_each_limit_in_the_place_of_its_like() -> None:
    ttft, gap = Slo("ttft", 90, 0.4), Slo("gap", 99, 0.012)
    tight, loose = Slo("gap", 99, 0.008), Slo("gap", 99, 0.03)
    assert sweep([ttft, gap], []) == [[ttft, gap]]
    assert sweep([ttft, gap], [loose, tight]) == [[ttft, tight], [ttft, loose]]


def test_a_client_that_does_not_keep_up_is_told_of() -> None:
    assert FINE.limit == ""
    slow = Health.of(
        [{"lateness": [0.0, 0.02], "lags": [0.001], "cpu_share": 0.9}, {"lateness": [], "lags": [], "cpu_share": 0.1}]
    )
    assert slow == Health(2, 0.02, 0.001, 0.9)
    measured = Measured("split", "4/s", Figures.of([record(0, 1.0)], None), slow, 4.0)
    (note,) = limits([measured])
    assert note.startswith("note: split, 4/s: the client is the limit (requests left 20.0 ms late (p99), it took 90% of a core)")


def test_the_tables_are_aligned_and_failures_have_no_time() -> None:
    lines = render(["a", "b", "c"], [["long", "x", "1"], ["s", "y", "200"]]).splitlines()
    assert lines == ["a     b    c", "long  x    1", "s     y  200"]
    figures = Figures.of([record(0, 0.5, 0.75), record(0, 2.0, error="X")], None)
    shown = load_table([Measured("split", "4/s", figures, FINE)]).splitlines()[1]
    assert "500 / failed / failed / failed" in shown and "250 / 250 / 250 / 250" in shown


def test_goodput_is_compared_with_the_first_system() -> None:
    slos = [Slo("gap", 99, 0.012)]
    found = [("split", Goodput(best=[(slos, 9.0)])), ("colocated", Goodput(best=[(slos, 6.0)]))]
    table = goodput_table(found).splitlines()
    assert table[0].split()[2:] == ["split", "colocated", "split", "/", "colocated"]
    assert table[1].split() == ["gap:p99:12ms", "requests/s", "9", "6", "1.50x"]
    nothing = goodput_table([("split", Goodput(best=[(slos, None)])), ("colocated", Goodput(best=[(slos, 6.0)]))])
    assert nothing.splitlines()[1].split()[2:] == ["none", "6", "-"]


def test_json_has_no_infinity() -> None:
    assert json.dumps(finite({"a": [math.inf, 1.0], "b": (math.nan,)}), allow_nan=False) == '{"a": [null, 1.0], "b": [null]}'
