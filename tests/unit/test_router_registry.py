"""Who is registered and why others are not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from common.errors import FailedPrecondition, Incompatible, InvalidRequest
from common.work import PageCounts, WorkerLoad
from router.cluster_view import worker_to_pb
from router.fleet.registry import LOST_SHOWN_SECONDS, Registry
from router.fleet.workers import Departure, Worker, WorkerState
from tests.helpers.workers import profile

pytestmark = pytest.mark.unit


class Listener:
    """Notes joins and leaves."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def joined(self, worker: Worker) -> None:
        self.log.append(f"+{worker.id}")

    def left(self, worker: Worker, *, with_last_words: bool) -> None:
        self.log.append(f"-{worker.id}")

    def reported(self) -> None:
        self.log.append("r")

    def changed(self) -> None:
        self.log.append("!")


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def registry(clock: Clock) -> Registry:
    return Registry(fingerprint="f", clock=clock)


def test_joining_and_leaving_are_told_once(registry: Registry) -> None:
    listener = Listener()
    registry.listen(listener)
    worker = registry.join(profile("p"))
    registry.leave(worker, "gone", Departure.BROKEN)
    registry.leave(worker, "gone again", Departure.BROKEN)
    assert listener.log == ["+p", "!", "-p", "!"]
    assert (registry.live, [lost.state for lost in registry.recently_lost]) == ([], [WorkerState.LOST])


def test_a_refusal_is_the_reason_until_it_is_old_or_mended(registry: Registry, clock: Clock) -> None:
    registry.join(profile("p", port=1))
    with pytest.raises(Incompatible, match=r"page_size differs: 32 on decode worker d at 127.0.0.1:2, 16 on prefill worker p"):
        registry.join(profile("d", "decode", port=2, page_size=32))
    assert "page_size differs: 32" in registry.why_none("decode")

    registry.join(profile("d2", "decode", port=2))
    registry.leave(registry.live[1], "killed", Departure.BROKEN)
    assert "page_size" not in registry.why_none("decode") and "killed" in registry.why_none("decode")

    clock.now += LOST_SHOWN_SECONDS
    assert registry.why_none("decode") == "no decode worker is registered"
    assert registry.recently_lost == []


@pytest.mark.parametrize("left_out", ["page_size", "max_context"])
def test_a_profile_without_its_sizes_is_refused_and_keeps_out_nobody(registry: Registry, left_out: str) -> None:
    differs: dict[str, Any] = {left_out: 0}
    with pytest.raises(InvalidRequest, match=f"{left_out} must be at least 1, got 0"):
        registry.join(profile("p", port=1, **differs))
    with pytest.raises(InvalidRequest, match="total_pages must be at least 1, got 0"):
        registry.join(replace(profile("p", port=1), total_pages=0))
    with pytest.raises(Incompatible, match="protocol_version differs"):  # A newer one may have other sizes.
        registry.join(profile("p", port=1, protocol_version=2, **differs))
    registry.join(profile("q", port=2))


def test_one_that_is_gone_is_shown_without_what_it_had_when_it_last_reported(registry: Registry) -> None:
    worker = registry.join(profile("p"))
    registry.report(worker, WorkerLoad(2, 1, 30, PageCounts(1, 9, 0, 0, 10)))
    shown = worker_to_pb(worker, registry.now)
    assert (shown.running, shown.waiting, shown.held_pages) == (2, 1, 9)
    registry.leave(worker, "it was stopped in order", Departure.IN_ORDER)
    shown = worker_to_pb(worker, registry.now)
    assert (shown.running, shown.waiting, shown.queued_tokens, shown.held_pages, shown.total_pages) == (0, 0, 0, 0, 10)


@pytest.mark.parametrize("is_over", [True, False])
def test_a_process_that_registers_again_is_one_worker_and_not_also_a_lost_one(registry: Registry, is_over: bool) -> None:
    former = registry.join(profile("p", port=1))
    if is_over:
        registry.leave(former, "its registration stream ended", Departure.BROKEN)
    again = registry.join(profile("p", port=1))
    assert again is not former and (registry.live, registry.recently_lost) == ([again], [])
    registry.leave(again, "gone", Departure.BROKEN)
    assert registry.recently_lost == [again]


def test_an_incompatible_successor_at_the_same_address_needs_only_to_suit_the_others(registry: Registry) -> None:
    registry.join(profile("old", port=1, page_size=32))
    registry.join(profile("new", port=1, page_size=64))
    assert [worker.id for worker in registry.live] == ["new"]


def test_a_replaced_worker_stays_out_while_its_successor_lives(registry: Registry) -> None:
    registry.join(profile("old", port=1))
    successor = registry.join(profile("new", port=1))
    with pytest.raises(FailedPrecondition, match="new at 127.0.0.1:1 has taken over from"):
        registry.join(profile("old", port=1))
    registry.leave(successor, "gone", Departure.BROKEN)
    assert registry.join(profile("old", port=1)).state is WorkerState.READY


def test_the_same_worker_registering_again_is_a_new_registration(registry: Registry) -> None:
    first = registry.join(profile("p"))
    second = registry.join(profile("p"))
    registry.leave(first, "its old stream ended", Departure.BROKEN)
    assert registry.live == [second] and second.state is WorkerState.READY


def test_why_none_tells_draining_from_unreachable(registry: Registry) -> None:
    worker = registry.join(profile("p"))
    worker.trouble = "connection refused"
    assert registry.why_none("prefill") == "no session with prefill worker p at 127.0.0.1:1: connection refused"
    registry.report(worker, WorkerLoad(draining=True))
    assert registry.why_none("prefill") == "every prefill worker is draining"


def test_an_impostor_at_another_address_does_not_keep_a_worker_out_once_that_address_is_its_owner_s_again(
    registry: Registry,
) -> None:
    """Found by tests/faults/test_fuzz.py: the owner of the address had taken over from a stranger who used the other's id."""
    registry.join(profile("victim", port=1))
    registry.join(profile("victim", port=2))  # The impostor, where `owner` listens.
    owner = registry.join(profile("owner", port=2))
    victim = registry.join(profile("victim", port=1))
    assert registry.live == [owner, victim]


def test_who_has_a_wrong_address_keeps_out_its_owner_only_until_somebody_else_is_found_there(registry: Registry) -> None:
    """Two workers started with one --advertise: none served, for as long as both lived."""
    registry.join(profile("owner"))
    wrong = registry.join(profile("wrong"))
    with pytest.raises(FailedPrecondition, match="worker wrong at 127.0.0.1:1 has taken over from prefill worker owner"):
        registry.join(profile("owner"))
    wrong.is_elsewhere = True
    owner = registry.join(profile("owner"))
    with pytest.raises(FailedPrecondition, match="worker owner at 127.0.0.1:1 has taken over from prefill worker wrong"):
        registry.join(profile("wrong"))
    assert registry.live == [owner]


def test_refusals_are_remembered_for_a_bounded_number_of_addresses(registry: Registry) -> None:
    for port in range(1, 1000):
        with pytest.raises(FailedPrecondition):
            registry.join(profile("x", port=port, fingerprint="other"))
    assert len(registry._refusals) == 256
    assert "fingerprint" in registry.why_none("prefill")


def test_a_worker_whose_session_stands_when_it_registers_again_is_the_same_one(registry: Registry) -> None:
    worker = registry.join(profile("d"))
    worker.has_session = True
    registry.leave(worker, "its registration stream ended", Departure.BROKEN)
    assert registry.live == [] and not worker.is_placeable

    assert registry.join(profile("d")) is worker, "we had noticed"
    assert registry.live == [worker] and registry.recently_lost == [] and worker.is_placeable
    assert registry.join(profile("d")) is worker, "we had not"


@pytest.mark.parametrize("departure", [Departure.SILENT, Departure.IN_ORDER, Departure.REPLACED])
def test_a_worker_that_was_given_up_is_a_new_one_when_it_registers_again(registry: Registry, departure: Departure) -> None:
    worker = registry.join(profile("d"))
    worker.has_session = True
    registry.leave(worker, "gone", departure)
    assert registry.join(profile("d")) is not worker


def test_a_worker_whose_address_another_has_got_is_not_resumed(registry: Registry) -> None:
    worker = registry.join(profile("d"))
    worker.has_session = True
    registry.leave(worker, "its registration stream ended", Departure.BROKEN)
    registry.join(replace(profile("other"), address=worker.profile.address))
    assert registry.join(profile("d")) is not worker
