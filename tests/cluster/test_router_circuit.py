"""A worker that fails again and again is left alone for a while, tried with one request, and used again."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from common.rpc.gen.pdserve.v1 import generation_pb2 as pb
from tests.helpers.eventually import eventually
from tests.helpers.fake_request import expected_output
from tests.helpers.router_stand import RouterStand

pytestmark = pytest.mark.cluster

PROMPT = [5, 6, 7, 8, 9]
FIVE = {"max_tokens": 5, "ignore_eos": True}
UNAVAILABLE, EXHAUSTED = grpc.StatusCode.UNAVAILABLE.value[0], grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]


async def circuits(stand: RouterStand) -> dict[str, str]:
    response = await stand.client.stub.GetCluster(pb.GetClusterRequest())
    return {worker.id: worker.circuit for worker in response.workers}


async def break_it(stand: RouterStand, times: int) -> None:
    """Requests whose first attempt fails on prefill-0, apart from each other so that each is a fault of its own."""
    for _ in range(times):
        stand.prefill[0].fail_next = [(UNAVAILABLE, "no answer from decode-0", True)]
        assert (await stand.client.generate(PROMPT, sampling=FIVE)).ids == expected_output(PROMPT, 5)
        if not stand.prefill[0].fail_next:
            await asyncio.sleep(0.25)


async def test_a_circuit_opens_after_repeated_faults_and_closes_after_one_good_try(tiny: Path) -> None:
    async with RouterStand(tiny, prefill=2, decode=2) as stand:
        await break_it(stand, 6)
        expected = {"prefill-0": "open", "decode-0": "open", "prefill-1": "closed", "decode-1": "closed"}
        assert await circuits(stand) == expected, "the decode worker of each failed attempt is a suspect too"
        assert stand.metric("pdserve_circuits", role="prefill", circuit="open") == 1
        cluster = (await stand.client.stub.GetCluster(pb.GetClusterRequest())).workers
        assert {worker.state for worker in cluster} == {"ready"}
        assert next(worker.trouble for worker in cluster if worker.id == "prefill-0") == "no answer from decode-0"
        before = len(stand.prefill[0].submits)
        await asyncio.gather(*(stand.client.generate(PROMPT, sampling=FIVE) for _ in range(4)))
        assert len(stand.prefill[0].submits) == before, "an open circuit lets nothing through"

        stand.prefill[0].fail_next = [(UNAVAILABLE, "no answer from decode-0", True)]
        await asyncio.sleep(1.0)
        await eventually(lambda: _are(stand, expected | {"decode-0": "closed"}), within=3)
        assert not stand.prefill[0].fail_next, "each of the two was tried in an attempt without the other"
        await eventually(lambda: _are(stand, dict.fromkeys(expected, "closed")), within=5)
        assert stand.metric("pdserve_circuits", role="prefill", circuit="closed") == 2


async def _are(stand: RouterStand, expected: dict[str, str]) -> bool:
    """After one more request."""
    await stand.client.generate(PROMPT, sampling=FIVE)
    found = await circuits(stand)
    assert found == expected, found
    return True


async def test_requests_wait_for_the_next_try_of_the_only_worker_and_health_is_not_touched(tiny: Path) -> None:
    async with RouterStand(tiny, max_attempts=1) as stand:
        for _ in range(6):
            stand.prefill[0].fail_next = [(UNAVAILABLE, "no answer from decode-0", True)]
            await stand.client.refusal(PROMPT, sampling=FIVE)
            await asyncio.sleep(0.25)
        code, message = await stand.client.refusal(PROMPT, sampling=FIVE)  # pair_wait is less than the pause.
        assert code is grpc.StatusCode.UNAVAILABLE and "the circuit of" in message and "no answer from decode-0" in message
        assert stand.router.fleet.is_ready, "else nobody would send it the request that closes it"
        await asyncio.sleep(1.0)
        assert (await stand.client.generate(PROMPT, sampling=FIVE)).ids == expected_output(PROMPT, 5)
        assert set((await circuits(stand)).values()) == {"closed"}


async def test_flt_07_refusals_full_and_leaving_workers_open_no_circuit(tiny: Path) -> None:
    async with RouterStand(tiny, max_attempts=1) as stand:
        for code, retryable in ((3, False), (11, False), (EXHAUSTED, True)):
            for _ in range(8):
                stand.prefill[0].fail_next = [(code, "as the client would have it", retryable)]
                await stand.client.refusal(PROMPT, sampling=FIVE)
        assert set((await circuits(stand)).values()) == {"closed"}
