"""Asking a decode worker after attempts whose prefill worker is gone."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from common.errors import Unavailable
from router.completion import Completion, Stage
from router.fleet.placement import Pair
from router.inquiries import Inquiries
from router.text.output import Output
from tests.helpers.eventually import eventually
from tests.helpers.workers import worker

pytestmark = pytest.mark.unit
GONE = Unavailable("the prefill worker is gone")


class Attempt:
    number = 3

    def __init__(self, *, session: bool = True) -> None:
        self.pair = Pair(worker("p", "prefill"), worker("d", "decode", session=session))


class Fleet:
    """And the one session in it."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def session(self, worker: Any) -> Fleet:
        return self

    def inquire(self, uid: int, attempt: int) -> None:
        self.asked.append((uid, attempt))


def completion(attempt: Any) -> Completion:
    events: Any = None
    made = Completion(uid=7, number=0, output=Output(None, request_id="r", number=0, logprobs=False), events=events)
    made.begin(attempt)
    return made


def make() -> tuple[Inquiries, Fleet, list[Any]]:
    fleet: Any = Fleet()
    lost: list[Any] = []
    return Inquiries(fleet, on_lost=lambda completion, error: lost.append((completion, error))), fleet, lost


async def test_nothing_is_given_up_before_the_decode_worker_has_said_no() -> None:
    inquiries, fleet, lost = make()
    asked = completion(Attempt())
    inquiries.begin(asked, GONE)
    assert fleet.asked == [(7, 3)] and lost == []
    inquiries.fail(asked)
    inquiries.fail(asked)
    assert lost == [(asked, GONE)], "once"


async def test_a_decode_worker_that_does_not_say_does_not_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.inquiries.ANSWER_SECONDS", 0.01)
    inquiries, _, lost = make()
    asked = completion(Attempt())
    inquiries.begin(asked, GONE)
    await eventually(lambda: lost == [(asked, GONE)], within=5)


async def test_one_without_a_session_is_not_asked() -> None:
    inquiries, fleet, lost = make()
    asked = completion(Attempt(session=False))
    inquiries.begin(asked, GONE)
    assert fleet.asked == [] and lost == [(asked, GONE)]


@pytest.mark.parametrize("how", ["handed off", "begun anew", "closed"])
async def test_a_late_no_is_not_heeded(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.setattr("router.inquiries.ANSWER_SECONDS", 0.01)
    inquiries, _, lost = make()
    asked = completion(Attempt())
    inquiries.begin(asked, GONE)
    if how == "handed off":
        asked.move_to(Stage.DECODE)
    elif how == "begun anew":
        other: Any = Attempt()
        asked.withdraw("failure")
        asked.begin(other)
    else:
        inquiries.close()
    await asyncio.sleep(0.05)
    inquiries.fail(asked)
    assert lost == []


async def test_what_was_asked_for_an_attempt_before_says_nothing_of_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.inquiries.ANSWER_SECONDS", 0.05)
    inquiries, _, lost = make()
    asked = completion(Attempt())
    inquiries.begin(asked, GONE)
    again: Any = Attempt()
    asked.withdraw("failure")
    asked.begin(again)
    monkeypatch.setattr("router.inquiries.ANSWER_SECONDS", 60.0)
    inquiries.begin(asked, GONE)
    await asyncio.sleep(0.2)
    assert lost == []
    inquiries.fail(asked)
    assert lost == [(asked, GONE)]
    inquiries.close()
