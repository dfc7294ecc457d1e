"""Attempts whose placing ends after the client has what it needs."""

from __future__ import annotations

import asyncio
from array import array
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from common.core import SamplingParams
from common.errors import Unavailable
from router.attempt import Work
from router.attempts import Attempts
from router.completion import Completion
from router.dispatch import Dispatch
from router.metrics import RouterMetrics
from router.output import Output
from router.placement import Ask, Pair
from tests.unit.test_router_placement import worker

pytestmark = pytest.mark.unit


class OnePair:
    """A fleet that has a pair for the first request, and from then on none."""

    def __init__(self) -> None:
        self.asked = 0
        self.given_up = asyncio.Event()

    async def place(self, ask: Ask) -> Pair:
        self.asked += 1
        if self.asked == 1:
            return Pair(worker("p", "prefill"), worker("d", "decode"))
        await self.given_up.wait()
        raise Unavailable("no prefill and decode pair")

    def session(self, worker: Any) -> None:
        return None


def make(fleet: Any, errors: list[Exception], *, n: int) -> tuple[Attempts, list[Completion]]:
    events: Any = None
    completions = [
        Completion(uid=i + 1, number=i, output=Output(None, request_id="r", number=i, logprobs=False), events=events)
        for i in range(n)
    ]
    work = Work(
        router_epoch=1,
        request_id="r",
        prompt=array("i", [1, 2, 3]),
        sampling=SamplingParams(seed=1),
        output_limit=8,
        logprobs=None,
        priority=0,
        page_size=4,
        deadline=None,
    )
    attempts = Attempts(
        work,
        completions,
        fleet=fleet,
        dispatch=Dispatch(),
        metrics=RouterMetrics(CollectorRegistry()),
        max_attempts=3,
        on_error=errors.append,
    )
    return attempts, completions


@pytest.mark.parametrize("stopped", [True, False])
async def test_a_completion_that_has_ended_does_not_fail_the_others_for_want_of_a_pair(stopped: bool) -> None:
    fleet, errors = OnePair(), list[Exception]()
    attempts, (first, _) = make(fleet, errors, n=2)
    attempts.begin()
    await asyncio.sleep(0)
    attempts.retracted(first)
    await asyncio.sleep(0)
    assert fleet.asked == 2, "it waits for a pair again"

    if stopped:
        attempts.stop(first)  # Its stop string was in what it had.
    fleet.given_up.set()
    await asyncio.sleep(0.01)

    assert len(errors) == (0 if stopped else 1)
    attempts.close()


async def test_what_is_closed_before_it_is_placed_leaves_nothing_behind(recwarn: pytest.WarningsRecorder) -> None:
    attempts, _ = make(OnePair(), [], n=1)
    attempts.begin()
    attempts.close()
    await asyncio.sleep(0.01)
    assert not list(recwarn), "a coroutine was never awaited"
