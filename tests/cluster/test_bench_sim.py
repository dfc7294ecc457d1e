"""A small comparison of policies, from the router to the table."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from bench.serving.figures import Slo
from bench.sim.__main__ import COLUMNS, measure, row

pytestmark = pytest.mark.cluster


@pytest.mark.timeout(60)
async def test_a_policy_under_a_trace_is_measured_in_simulated_time(tmp_path: Path) -> None:
    args = argparse.Namespace(
        prefill=2,
        decode=2,
        processes=1,
        time_scale=2.0,
        seed=1,
        sim_profile=None,
        router_args=[],
        decode_args=[],
        rate=20.0,
        seconds=3.0,
        slo=[Slo.parse("ttft:max:60s")],
    )
    found = await measure(args, "prefix", "chats", tmp_path)
    assert (found["trace"], found["policy"], found["failed"]) == ("chats", "prefix", {})
    assert 20 < found["requests"] < 60, "of two simulated seconds at 20 a second"
    assert found["good_share"] == 1.0 and found["good_requests_per_s"] == found["requests"] / 2
    assert 0 < found["cached_share"] < 1
    assert found["ms"]["tpot"]["p50"] > 4.0, "a step takes 5 ms; a first token that is told late shortens the mean a little"
    assert len(row(found)) == len(COLUMNS)
