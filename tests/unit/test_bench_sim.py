"""Traffic for policies: the same for all of them, as it is described, and what makes a request good."""

from __future__ import annotations

from collections import Counter

import pytest

from bench.serving.figures import Slo
from bench.serving.records import Record
from bench.serving.shots import Window
from bench.sim.__main__ import is_good, summary
from bench.sim.shooter import Seen
from bench.sim.traffic import BURST_PERIOD, BURST_SHARE, LONGEST_CHAT, TRACES, Question, TraceName, Traffic, zipf

RATE, SECONDS = 300.0, 4.0


def questions(trace: TraceName, *, seed: int = 0) -> list[Question]:
    return Traffic(trace, rate=RATE, seconds=SECONDS, seed=seed).questions()


@pytest.mark.parametrize("trace", TRACES)
def test_the_same_seed_asks_the_same_at_about_the_rate(trace: TraceName) -> None:
    asked = questions(trace)
    assert asked == questions(trace) != questions(trace, seed=1)
    assert len(asked) == pytest.approx(RATE * SECONDS, rel=0.15)
    assert all(0 < question.at < SECONDS and question.prompt and 2 <= question.output_tokens <= 200 for question in asked)
    assert [question.at for question in asked] == sorted(question.at for question in asked)


def test_bursts_have_three_times_the_rate() -> None:
    inside = sum(question.at % BURST_PERIOD < BURST_SHARE * BURST_PERIOD for question in questions("bursts"))
    assert inside == pytest.approx(3 * BURST_SHARE * RATE * SECONDS, rel=0.2)


def test_documents_are_shared_and_some_are_popular() -> None:
    beginnings = Counter(question.prompt[:64] for question in questions("documents"))
    (_, most), *_ = beginnings.most_common(1)
    assert 50 < len(beginnings) < 256 and most > 0.1 * RATE * SECONDS
    assert len({question.prompt for question in questions("documents")}) > 0.99 * RATE * SECONDS * 0.85


def test_a_chat_s_turn_repeats_what_came_before() -> None:
    last: dict[str, bytes] = {}
    repeats = 0
    for question in questions("chats"):
        before = last.get(question.session)
        if before is not None and len(before) <= LONGEST_CHAT:
            assert question.prompt.startswith(before)
            repeats += 1
        last[question.session] = question.prompt
    assert repeats > 100 and all(session.startswith("chat-") for session in last)


def test_zipf_weights_fall_with_the_rank() -> None:
    assert zipf(4) == [1, 1 / 2, 1 / 3, 1 / 4]


def seen(*, ttft: float, gap: float, cached: int = 0, error: str = "", kind: str = "measured") -> Seen:
    record = Record("warm" if kind == "warm" else "measured", 1.0, 100, 3, sent=1.0, ended=2.0, error=error)
    record.times, record.counts = [1.0 + ttft, 1.0 + ttft + 2 * gap], [1, 2]
    return Seen(record, cached_tokens=cached)


SLOS = [Slo.parse("ttft:max:400ms"), Slo.parse("gap:max:12ms")]


def test_a_good_request_keeps_every_objective() -> None:
    assert is_good(seen(ttft=0.39, gap=0.0119), SLOS)
    assert not is_good(seen(ttft=0.41, gap=0.001), SLOS)
    assert not is_good(seen(ttft=0.1, gap=0.013), SLOS)
    assert not is_good(seen(ttft=0.1, gap=0.001, error="UNAVAILABLE"), SLOS)


def test_the_warm_up_is_not_measured() -> None:
    all_seen = [seen(ttft=9.0, gap=9.0, kind="warm", cached=100), seen(ttft=0.1, gap=0.01, cached=50), seen(ttft=1.0, gap=0.01)]
    found = summary(all_seen, Window(warmup=0.5, seconds=2.0), SLOS)
    assert (found["requests"], found["cached_share"], found["good_share"], found["good_requests_per_s"]) == (2, 0.25, 0.5, 0.5)
