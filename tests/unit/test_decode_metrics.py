"""What a decode worker counts of handoffs."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from decode_worker import commands
from decode_worker.events import HandedOver
from decode_worker.metrics import DecodeMetrics
from tests.helpers.decode_core import Harness, first_tokens, make_req


def test_a_commit_that_says_when_its_prompt_was_computed_is_timed_once() -> None:
    harness = Harness(pages=8)
    req = make_req([1, 2, 3], uid=1)
    granted = harness.granted(harness.reserve(req))
    commit = commands.Commit(granted.ticket, first_tokens(req), len(granted.page_ids), computed_at=harness.now - 0.25)
    for _ in range(2):  # Ahead, and by gRPC.
        harness.do(commit)
    assert [event for event in harness.events if isinstance(event, HandedOver)] == [HandedOver(0.25)]


def test_exposed_time_is_a_histogram() -> None:
    registry = CollectorRegistry()
    DecodeMetrics(registry=registry).take(HandedOver(0.0004), draining=False)
    assert registry.get_sample_value("pdserve_handoff_exposed_seconds_bucket", {"le": "0.0005"}) == 1
    assert registry.get_sample_value("pdserve_handoff_exposed_seconds_sum") == 0.0004
