"""What bench/router.py makes of the responses that its client got."""

from __future__ import annotations

import pytest

from bench.router import measure
from bench.steps import IDS, Steps, age
from common.rpc.gen.pdserve.v1 import generation_pb2

pytestmark = pytest.mark.unit
TICK = 0.01


def arrival(now: float, request_id: str, *ids: int) -> tuple[float, bytes]:
    response = generation_pb2.GenerateResponse(request_id=request_id)
    response.delta.token_ids.extend(ids)
    return now, response.SerializeToString()


def made_at(seconds: float) -> int:
    return int(seconds / TICK) % IDS


def test_an_id_tells_the_time_of_its_step_to_a_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    for stepped_at in (0.0, 7.123, 99.999):
        monkeypatch.setattr("bench.steps.time.monotonic", lambda at=stepped_at: at)
        token_id = Steps(gap=0, tick=TICK).stamp()
        assert 0 <= token_id < IDS
        for later in (0.0, 0.004, 1.7, 2.5):
            assert abs(age(token_id, stepped_at + later, tick=TICK) - later) <= TICK


def test_a_rate_and_ages_are_of_the_time_in_which_all_streams_run() -> None:
    arrivals = [arrival(10 + i / 10, "a", made_at(9.9 + i / 10)) for i in range(60)]
    arrivals += [arrival(12 + i / 10, "b", made_at(11.5 + i / 10), made_at(11.5 + i / 10)) for i in range(21)]
    finished = generation_pb2.GenerateResponse(request_id="a")
    finished.finished.SetInParent()
    measured = measure([*arrivals, (20.0, finished.SerializeToString())], tick=TICK)
    assert (measured.tokens, measured.deltas, measured.first, measured.last) == (102, 81, 10.0, 15.9)
    assert measured.steady_rate == pytest.approx(30, rel=0.05), "from 12 to 14: ten of a and twenty of b a second"
    assert sorted(measured.ages)[0] == pytest.approx(0.1, abs=TICK) and max(measured.ages) == pytest.approx(0.5, abs=TICK)


def test_streams_that_never_all_run_have_neither() -> None:
    measured = measure(
        [arrival(1 + i / 10, "a", 0) for i in range(9)] + [arrival(9 + i / 10, "b", 0) for i in range(9)], tick=TICK
    )
    assert measured.tokens == 18 and measured.steady_rate == 0 and not measured.ages


def test_ages_near_what_ids_can_tell_are_not_told() -> None:
    late = 0.8 * IDS * TICK
    measured = measure([arrival(10 + i / 10, "a", made_at(10 + i / 10 - late)) for i in range(40)], tick=TICK)
    assert measured.steady_rate and not measured.ages
