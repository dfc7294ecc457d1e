"""What a prefill worker that is to go does with its sessions, and with what a leaving decode worker refuses."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import grpc
import pytest

from common.errors import LEAVING_METADATA, Leaving
from tests.helpers.eventually import eventually
from tests.helpers.prefill_service import serving

pytestmark = pytest.mark.cluster
IDS = list(range(10))
Status = grpc.StatusCode


async def test_a_draining_worker_finishes_what_it_has_and_takes_nothing_new_FLT_06() -> None:
    async with serving() as at:
        go = asyncio.Event()
        router = await at.open_with_reserve_held(go, IDS, uid=1)
        draining = asyncio.create_task(at.stand.worker.drain(timedelta(seconds=5)))
        await eventually(lambda: at.stand.worker.load().draining, within=1)
        await router.submit(IDS, uid=2)
        failure = (await router.read()).failure
        assert (failure.uid, failure.code, failure.retryable) == (2, Status.UNAVAILABLE.value[0], True)
        assert failure.handed_back, "it costs the request no attempt"
        go.set()
        assert await router.kinds(3) == ["started", "first_token", "handed_off"]
        await asyncio.wait_for(draining, 2)

        at.stand.worker.undrain()
        await router.submit(IDS, uid=3)
        assert await router.kinds(3) == ["started", "first_token", "handed_off"]


async def test_what_a_leaving_decode_worker_refuses_is_handed_back() -> None:
    async def leaving(request: Any, context: Any) -> None:
        await context.abort(Status.UNAVAILABLE, "this decode worker is draining", (LEAVING_METADATA,))

    async with serving() as at:
        at.decode.before["Reserve"] = leaving
        router = await at.open()
        await router.submit(IDS, uid=1)
        failure = (await router.read()).failure
        assert failure.handed_back and failure.message == "this decode worker is draining"


async def test_what_is_left_after_the_grace_is_handed_back_and_the_session_ends_with_a_status_GRP_02() -> None:
    async with serving() as at:
        never = asyncio.Event()
        router = await at.open_with_reserve_held(never, IDS)
        await at.stand.worker.drain(timedelta(seconds=0.1))
        failure = (await router.read()).failure
        assert "is leaving" in failure.message and failure.retryable and failure.handed_back
        await at.servicer.end_sessions(Leaving("it has left"), flush_seconds=1)
        assert await router.end() == (Status.UNAVAILABLE, "it has left")
        assert LEAVING_METADATA in tuple(await router.call.trailing_metadata() or ())
        never.set()
