"""Who is granted pages when, who has to give them up, and which pages nobody may have yet."""

from __future__ import annotations

import pytest

from common.engine.handle import Reply
from common.errors import Aborted, FailedPrecondition
from common.handoff.base import Transport
from common.work import PageCounts
from common.work_key import WorkKey
from decode_worker import commands, events
from tests.helpers.decode_core import EPOCH, LEASE, Harness, make_req

pytestmark = pytest.mark.usefixtures("each_lookahead")
PROMPT = list(range(10, 20))  # Three pages of 4; a fourth for growth.


def one_full(pages: int = 4) -> tuple[Harness, commands.Granted]:
    """A pool that one reservation fills."""
    harness = Harness(pages=pages)
    return harness, harness.granted(harness.reserve(make_req(PROMPT, uid=100)))


def served(harness: Harness) -> list[int]:
    """Call ids of granted Reserves, in order."""
    return [event.call_id for event in harness.events if isinstance(event, Reply) and event.error is None]


def test_the_line_is_served_by_priority_then_arrival_then_router() -> None:
    harness, granted = one_full()
    harness.do(commands.SessionOpened(8))
    wanted = [(0, 3, EPOCH), (0, 2, 8), (5, 9, EPOCH), (0, 2, EPOCH), (-1, 1, EPOCH)]
    calls = {
        harness.reserve(make_req([*PROMPT, i], uid=uid, priority=priority, epoch=epoch)): (priority, uid, epoch)
        for i, (priority, uid, epoch) in enumerate(wanted)
    }
    harness.do(commands.Release(granted.ticket, drained=True))
    order = []
    for _ in wanted:
        call_id = served(harness)[-1]
        order.append(calls[call_id])
        harness.do(commands.Release(harness.granted(call_id).ticket, drained=True))
    assert order == [(5, 9, EPOCH), (0, 2, EPOCH), (0, 2, 8), (0, 3, EPOCH), (-1, 1, EPOCH)]


def test_a_small_request_does_not_overtake_a_large_one_that_waits() -> None:
    harness = Harness(pages=8)
    first = harness.granted(harness.reserve(make_req(PROMPT, uid=1)))
    large, small = harness.reserve(make_req(range(40, 60), uid=2)), harness.reserve(make_req([1], uid=3))
    assert harness.reply(large) is None
    assert harness.reply(small) is None
    harness.do(commands.Release(first.ticket, drained=True))
    assert harness.reply(large) is not None
    assert harness.reply(small) is not None


def test_an_abandoned_reserve_leaves_the_line() -> None:
    harness, granted = one_full()
    gone, next_one = harness.reserve(make_req(PROMPT, uid=1)), harness.reserve(make_req(PROMPT, uid=2))
    harness.core.abandon(gone)
    harness.do(commands.Release(granted.ticket, drained=True))
    assert harness.reply(gone) is not None
    assert isinstance(harness.reply(gone).error, Aborted)  # type: ignore[union-attr]
    assert harness.granted(next_one).page_ids


def test_abandoning_a_granted_reserve_frees_its_pages_at_once_because_nobody_knows_them() -> None:
    harness = Harness()
    call_id = harness.reserve(make_req(PROMPT))
    assert harness.counts().held == 4
    harness.core.abandon(call_id)
    harness.assert_idle()


def test_abandoning_a_granted_grpc_reserve_waits_for_the_event_loop_all_the_same() -> None:
    harness = Harness()
    call_id = harness.reserve(make_req(PROMPT), transport="grpc")
    harness.core.abandon(call_id)
    assert harness.counts().quarantined == 3
    harness.do(commands.Drained("ticket-1"))
    harness.assert_idle()


def test_abandoning_after_commit_changes_nothing() -> None:
    harness = Harness()
    req = make_req(PROMPT)
    call_id = harness.reserve(req)
    harness.commit(req, harness.granted(call_id))
    harness.core.abandon(call_id)
    harness.run()
    assert len(harness.tokens(req.key)) == 4


@pytest.mark.parametrize("transport", ["cuda_ipc", "shm"])
@pytest.mark.parametrize("how", ["cancel", "lease", "session", "release"])
def test_hnd_09_pages_of_an_ended_ticket_are_nobodys_until_the_sender_that_writes_has_drained(
    how: str, transport: Transport
) -> None:
    harness = Harness(pages=4)
    req = make_req(PROMPT)
    granted = harness.granted(harness.reserve(req, transport=transport))
    end_ticket(harness, granted, how, req.key)
    assert harness.counts() == PageCounts(free=1, held=0, cached=0, quarantined=3, total=4)
    harness.do(commands.Drained(granted.ticket))  # The event loop does not write to them: its word counts for nothing.
    harness.do(commands.Release(granted.ticket, drained=False))
    assert harness.counts().quarantined == 3
    harness.do(commands.Release(granted.ticket, drained=True))
    harness.do(commands.Release(granted.ticket, drained=True))
    harness.assert_idle()


@pytest.mark.parametrize("how", ["cancel", "lease", "session", "release"])
def test_grpc_pages_of_an_ended_ticket_are_nobodys_until_the_event_loop_has_closed_the_stream(how: str) -> None:
    harness = Harness(pages=4)
    req = make_req(PROMPT)
    granted = harness.granted(harness.reserve(req, transport="grpc"))
    end_ticket(harness, granted, how, req.key)
    closed = harness.told(events.TicketClosed)
    assert [event.ticket for event in closed] == [granted.ticket]
    # The sender's word counts for nothing: frames may be buffered here.
    harness.do(commands.Release(granted.ticket, drained=True))
    harness.do(commands.SenderGone("pair"))
    assert harness.counts().quarantined == 3
    harness.do(commands.Drained(granted.ticket))
    harness.assert_idle()


def end_ticket(harness: Harness, granted: commands.Granted, how: str, key: WorkKey) -> None:
    if how == "cancel":
        harness.do(commands.Cancel(key))
    elif how == "lease":
        harness.tick(11)
    elif how == "session":
        harness.do(commands.SessionClosed(EPOCH))
    else:
        harness.do(commands.Release(granted.ticket, drained=False))


def test_releasing_a_drained_shm_ticket_frees_its_pages_at_once() -> None:
    harness, granted = one_full()
    harness.do(commands.Release(granted.ticket, drained=True))
    harness.assert_idle()


def test_flt_03_the_end_of_a_sender_ends_its_tickets_and_frees_their_pages_and_quarantine() -> None:
    harness = Harness()
    live = harness.granted(harness.reserve(make_req(PROMPT, uid=1)))
    ended = harness.granted(harness.reserve(make_req(PROMPT, uid=2)))
    other = harness.granted(harness.reserve(make_req(PROMPT, uid=3), pair_id="other"))
    harness.do(commands.Release(ended.ticket, drained=False))
    harness.do(commands.SenderGone("pair"))
    assert harness.do(commands.Renew((live.ticket, other.ticket))) == [live.ticket]
    assert harness.counts()[1:4] == (4, 0, 0)
    failures = [event.failure for event in harness.told(events.Failed)]
    assert [(failure.key.uid, failure.retryable) for failure in failures] == [(1, True)]


def test_a_sender_s_reserve_in_line_does_not_keep_its_own_quarantine_from_ending() -> None:
    harness = Harness(pages=8)
    harness.granted(harness.reserve(make_req(range(20), uid=1)))  # An answer that got lost: nobody will ever release it.
    waiting = harness.reserve(make_req(range(30, 50), uid=2))
    other = harness.reserve(make_req(range(60, 80), uid=3), pair_id="newer pair")
    harness.tick(LEASE.total_seconds())
    assert harness.counts().quarantined == 5 and harness.reply(waiting) is None

    harness.tick(LEASE.total_seconds() + 0.1)

    reply = harness.reply(waiting)
    assert reply is not None and isinstance(reply.error, FailedPrecondition), "it lets go of its mapping and pairs again"
    assert harness.reply(other) is None
    harness.do(commands.SenderGone("pair"))
    assert harness.granted(other)


def test_a_reserve_in_line_learns_that_its_pairing_ended() -> None:
    harness, granted = one_full()
    call_id = harness.reserve(make_req(PROMPT, uid=1), pair_id="gone")
    harness.do(commands.SenderGone("gone"))
    reply = harness.reply(call_id)
    assert reply is not None and isinstance(reply.error, FailedPrecondition)
    assert not harness.told(events.Failed)
    assert harness.do(commands.Renew((granted.ticket,))) == []


def test_a_grpc_ticket_is_opened_before_its_reply_and_closed_by_its_commit() -> None:
    harness = Harness()
    harness.new_events()
    req = make_req(PROMPT)
    granted = harness.granted(harness.reserve(req, transport="grpc"))
    assert [type(event) for event in harness.new_events()] == [events.TicketOpened, Reply]
    harness.commit(req, granted)
    assert events.TicketClosed(granted.ticket, "") in harness.new_events()
    harness.do(commands.Drained(granted.ticket))
    harness.run()
    harness.assert_idle()


def test_a_cuda_ipc_sender_that_is_gone_ends_its_tickets_and_a_checksum_covers_the_tokens_alone() -> None:
    harness = Harness()
    req = make_req(PROMPT)
    gone = harness.granted(harness.reserve(make_req([1, 2, 3], uid=9), transport="cuda_ipc", pair_id="other"))
    granted = harness.granted(harness.reserve(req, transport="cuda_ipc", verify=True))
    harness.do(commands.SenderGone("other"))
    assert harness.do(commands.Renew((gone.ticket, granted.ticket))) == [gone.ticket]
    harness.runner.pool.page_view(granted.page_ids[-1])[:] = b"?" * harness.runner.pool.page_bytes  # What was there before.
    harness.commit(req, granted, verify=True)
    assert harness.do(commands.Renew((granted.ticket,))) == [], "a Renew that a commit has overtaken loses nothing"
    harness.run()
    assert len(harness.tokens(req.key)) == 4
    harness.assert_idle()
