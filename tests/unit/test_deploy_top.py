"""The table of deploy.top."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from common.rpc.gen.pdserve.v1 import generation_pb2 as pb
from deploy.top import Rates, _span, show


def printed(cluster: pb.GetClusterResponse, rates: Rates | None = None) -> str:
    console = Console(width=240, file=io.StringIO())
    console.print(show(cluster, address="router:1", rates=rates))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_worker_is_one_line_with_what_it_does_and_has() -> None:
    decode = pb.Worker(
        id="decode-1", role="decode", device="cuda:1", state="ready", has_session=True, running=3, max_running=64, waiting=2,
        queued_tokens=17, in_flight=4, free_pages=10, held_pages=20, cached_pages=30, quarantined_pages=1, total_pages=61,
        attempts=9, attempts_failed=5, last_report_ms=312, circuit="half-open", trouble="its session broke",
    )  # fmt: skip
    lost = pb.Worker(id="prefill-2", role="prefill", device="cpu", state="lost")
    router = pb.Router(version="1.2", uptime_ms=7_300_000, is_ready=True, in_flight=5, max_in_flight=4096)
    lines = printed(pb.GetClusterResponse(workers=[decode, lost], router=router)).splitlines()
    assert "router router:1  1.2, up 2h, ready" in lines[0]
    assert "in flight 5 of 4096" in lines[1]
    assert [line.split()[0] for line in lines[3:]] == ["worker", "prefill-2", "decode-1"], "prefill workers come first"
    assert lines[5].split()[:9] == ["decode-1", "decode", "cuda:1", "ready", "0.3s", "3/64", "2", "17", "4"]
    assert lines[5].split()[9:] == [*["10", "20", "30", "1", "61", "5", "9", "half-open"], "its", "session", "broke"]


def test_what_is_wrong_is_said() -> None:
    closed = pb.Worker(id="p", role="prefill", state="unreachable", trouble="nobody answers [/at] [all]")
    shown = printed(pb.GetClusterResponse(workers=[closed], router=pb.Router(why_not_ready="no decode worker is registered")))
    assert "not ready: no decode worker is registered" in shown
    assert "unreachable" in shown and "nobody answers [/at] [all]" in shown
    assert "(none is registered)" in printed(pb.GetClusterResponse())


def test_rates_are_those_between_two_looks_and_begin_anew_with_the_router() -> None:
    before, after = pb.Router(requests=10, output_tokens=100), pb.Router(requests=14, output_tokens=300)
    assert Rates.between(before, after, seconds=2.0) == (2.0, 100.0)
    assert Rates.between(after, before, seconds=1.0) == (10.0, 100.0)
    assert "2.0 requests/s, 100 tokens/s" in printed(pb.GetClusterResponse(), Rates(2.0, 100.0))


@pytest.mark.parametrize(
    ("milliseconds", "text"),
    [(0, "0.0s"), (9_940, "9.9s"), (12_000, "12s"), (119_000, "119s"), (180_000, "3m"), (7_200_000, "2h")],
)
def test_spans_are_short(milliseconds: int, text: str) -> None:
    assert _span(milliseconds) == text
