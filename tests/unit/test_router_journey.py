"""A journey whose reader does not read."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from common.errors import PdserveError, ResourceExhausted, Unavailable
from common.rpc.gen.pdserve.v1 import generation_pb2, work_pb2
from router import journey as journey_module
from router.attempt import Attempt
from router.completion import Completion, Stage
from router.fleet.placement import Pair
from router.journey import Journey
from router.metrics import RouterMetrics
from router.pacing import Outlet, Rounds
from router.stake import Stake
from router.stopwatch import Stopwatch
from router.text.output import PLAIN_TOKEN_BYTES, Output
from tests.helpers.workers import worker

pytestmark = pytest.mark.unit


class NoAttempts:
    """Stands in for Attempts: nothing is placed, ends are noted."""

    cached_tokens = 0
    prefill_started_at = None

    def __init__(self) -> None:
        self.pair = Pair(worker("p", "prefill"), worker("d", "decode"))
        self.closed = 0

    def begin(self) -> None:
        pass

    def finished(self, completion: Completion) -> None:
        completion.move_to(Stage.ENDED)

    def close(self) -> None:
        self.closed += 1


def make(**options: Any) -> tuple[Journey, Completion, Any]:
    attempts: Any = NoAttempts()
    stopwatch = Stopwatch(arrived_at=0.0, metrics=RouterMetrics(CollectorRegistry()))
    journey = Journey("r", prompt_tokens=1, outlet=Outlet(Rounds(active_streams=lambda: 0)), stopwatch=stopwatch, **options)
    completion = Completion(uid=1, number=0, output=Output(None, request_id="r", number=0, logprobs=False), events=journey)
    journey.prepare([completion], attempts)
    stake = Stake(attempts.pair, members=1, tokens=1, pages=1, on_freed=lambda tokens: None)
    completion.begin(Attempt(1, attempts.pair, (completion,), stake))
    return journey, completion, attempts


def deliver(completion: Completion, indices: Sequence[int]) -> None:
    for index in indices:
        completion.deliver(work_pb2.Token(uid=1, attempt=1, index=index, token_id=7), 1.0)


async def never(response: generation_pb2.GenerateResponse) -> None:
    await asyncio.Event().wait()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journey_module, "LAST_WRITE_SECONDS", 0.05)
    monkeypatch.setattr(journey_module, "MAX_UNREAD_BYTES", 100 * PLAIN_TOKEN_BYTES)


async def test_unread_tokens_are_bounded_and_the_call_ends_with_the_limit_cap_05() -> None:
    journey, completion, attempts = make()
    running = asyncio.create_task(journey.run(never, on_first_token=lambda: None))
    deliver(completion, [0])
    await asyncio.sleep(0.01)

    deliver(completion, range(1, 102))

    assert attempts.closed, "the workers are told at once, not when the reader wakes"
    with pytest.raises(ResourceExhausted, match="limit is 100 tokens of this kind"):
        await asyncio.wait_for(running, 1)


async def test_a_client_that_reads_nothing_for_too_long_is_ended_with_the_limit_cap_05() -> None:
    journey, completion, attempts = make(slow_client_timeout=timedelta(milliseconds=50))
    running = asyncio.create_task(journey.run(never, on_first_token=lambda: None))
    deliver(completion, [0])
    with pytest.raises(ResourceExhausted, match="the client has read nothing for 0.05 s .--slow-client-timeout."):
        await asyncio.wait_for(running, 1)
    assert attempts.closed


async def test_a_client_that_reads_slowly_but_does_is_kept_cap_05() -> None:
    journey, completion, _ = make(slow_client_timeout=timedelta(milliseconds=400))
    written = []

    async def slowly(response: generation_pb2.GenerateResponse) -> None:
        await asyncio.sleep(0.1)
        written.append(response)

    running = asyncio.create_task(journey.run(slowly, on_first_token=lambda: None))
    for index in range(5):
        deliver(completion, [index])
        await asyncio.sleep(0.11)
    completion.deliver(work_pb2.Token(uid=1, attempt=1, index=5, token_id=7, finish=generation_pb2.FINISH_REASON_LENGTH), 1.0)
    await asyncio.wait_for(running, 10)
    assert written[-1].WhichOneof("event") == "finished"


async def test_a_client_that_waits_for_the_next_token_is_not_slow_cap_05() -> None:
    journey, completion, _ = make(slow_client_timeout=timedelta(milliseconds=30))

    async def write(response: generation_pb2.GenerateResponse) -> None:
        pass

    running = asyncio.create_task(journey.run(write, on_first_token=lambda: None))
    deliver(completion, [0])
    await asyncio.sleep(0.15)
    completion.deliver(work_pb2.Token(uid=1, attempt=1, index=1, token_id=7, finish=generation_pb2.FINISH_REASON_LENGTH), 1.0)
    await asyncio.wait_for(running, 1)


async def test_a_status_does_not_wait_for_a_reader_grp_02() -> None:
    journey, completion, _ = make()
    running = asyncio.create_task(journey.run(never, on_first_token=lambda: None))
    deliver(completion, [0])
    await asyncio.sleep(0.01)
    journey.end(Unavailable("first"))
    journey.end(PdserveError("a later end changes nothing"))
    with pytest.raises(Unavailable, match="first"):
        await asyncio.wait_for(running, 1)


async def test_a_client_s_cancel_stays_a_cancel_and_closes() -> None:
    journey, completion, attempts = make()
    running = asyncio.create_task(journey.run(never, on_first_token=lambda: None))
    deliver(completion, [0])
    await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert attempts.closed


async def test_what_came_before_a_status_is_still_delivered() -> None:
    journey, completion, _ = make()
    written: list[generation_pb2.GenerateResponse] = []

    async def write(response: generation_pb2.GenerateResponse) -> None:
        written.append(response)

    running = asyncio.create_task(journey.run(write, on_first_token=lambda: None))
    deliver(completion, [0, 1])
    journey.end(Unavailable("x"))
    with pytest.raises(Unavailable):
        await asyncio.wait_for(running, 1)
    assert [response.WhichOneof("event") for response in written] == ["started", "delta"]
    assert list(written[1].delta.token_ids) == [7, 7]


async def test_a_call_whose_completions_have_all_finished_gets_no_other_status() -> None:
    journey, completion, _ = make()
    written: list[str | None] = []

    async def write(response: generation_pb2.GenerateResponse) -> None:
        written.append(response.WhichOneof("event"))
        if written[-1] == "finished":
            journey.end(Unavailable("the router is shutting down"))  # While its reader takes the last event.

    running = asyncio.create_task(journey.run(write, on_first_token=lambda: None))
    completion.deliver(work_pb2.Token(uid=1, attempt=1, index=0, token_id=7, finish=generation_pb2.FINISH_REASON_LENGTH), 1.0)
    await asyncio.wait_for(running, 1)
    assert written == ["started", "delta", "finished"]
