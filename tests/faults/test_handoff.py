"""The way of the KV from prefill to decode: refused, repeated, cut, stalled."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path

import grpc
import pytest

from tests.helpers import reference
from tests.helpers.client import Client, first_event
from tests.helpers.cluster import Cluster, free_port
from tests.helpers.eventually import eventually
from tests.helpers.prompts import prompt
from tests.helpers.relay import Relay

pytestmark = pytest.mark.faults


@pytest.mark.parametrize("transport", ["shm", "grpc"])
@pytest.mark.timeout(120)
async def test_hnd_01_and_11_a_prompt_prefill_cannot_hold_is_an_error_that_names_the_limit(
    tiny: Path, tmp_path: Path, transport: str
) -> None:
    with Cluster(
        tmp_path,
        tiny,
        worker_args=["--page-size", "4", "--max-context", "64"],
        prefill_args=["--pool-pages", "16", "--transport", transport],
        decode_args=["--pool-pages", "64"],
    ) as cluster:
        async with cluster.client() as client:
            for length in (64, 65, 100):
                code, message = await client.refusal(prompt(length), sampling={"max_tokens": 4})
                assert code is grpc.StatusCode.OUT_OF_RANGE and "63" in message
            ids = prompt(60)
            assert (await client.generate(ids, sampling={"max_tokens": 4, "ignore_eos": True})).ids == reference.greedy(
                tiny, ids, 4
            )
            await cluster.capacity_probe(client)


@pytest.mark.timeout(120)
async def test_hnd_04_a_full_prefix_hit_still_completes_the_handoff(cluster: Cluster, client: Client, tiny: Path) -> None:
    ids = prompt(32, seed=4)
    expected = reference.greedy(tiny, ids, 4)
    for _ in range(200):
        assert (await client.generate(ids, sampling={"max_tokens": 4, "ignore_eos": True})).ids == expected
    await cluster.capacity_probe(client)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("transport", ["shm", "grpc"])
async def test_hnd_05_output_does_not_decay_over_many_handoffs(tiny: Path, tmp_path: Path, transport: str) -> None:
    rng = random.Random(5)
    prompts = [prompt(length, seed=5) for length in rng.sample(range(1, 120), 20)]
    expected = [reference.greedy(tiny, ids, 24) for ids in prompts]
    args = ["--page-size", "4", "--pool-pages", "320", "--max-context", "256"]
    with Cluster(tmp_path, tiny, worker_args=args, prefill_args=["--transport", transport]) as cluster:
        async with cluster.client() as client:
            gate = asyncio.Semaphore(8)

            async def one() -> None:
                which = rng.randrange(20)
                async with gate:
                    call = client.call(prompts[which], sampling={"max_tokens": 24, "ignore_eos": True})
                    if rng.random() < 0.1:
                        await asyncio.sleep(rng.random() * 0.05)
                        call.cancel()
                        return
                    assert [token async for event in call for token in event.delta.token_ids] == expected[which]

            await asyncio.gather(*(one() for _ in range(250)))
            await cluster.capacity_probe(client)


class RelayedDecode:
    """A cluster of one prefill and one decode worker whose every connection to decode goes through a relay."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.listen = f"127.0.0.1:{free_port()}"
        self.relay = Relay(self.listen)

    async def __aenter__(self) -> RelayedDecode:
        await self.relay.__aenter__()
        self.cluster.start_worker("decode", listen=self.listen, extra=["--advertise", self.relay.address])
        await asyncio.to_thread(self.cluster.router.wait_for_line, "router ready on")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.relay.__aexit__(None, None, None)


@pytest.mark.timeout(120)
async def test_hnd_07_and_09_a_transfer_that_stalls_is_given_up_and_its_pages_come_back(tiny: Path, tmp_path: Path) -> None:
    args = ["--page-size", "4", "--pool-pages", "600", "--max-context", "2048"]
    cluster = Cluster(
        tmp_path,
        tiny,
        decode=0,
        worker_args=args,
        prefill_args=["--transport", "grpc", "--chunk-tokens", "64", "--transfer-timeout", "3s"],
        decode_args=["--lease", "3s"],
    )
    try:
        cluster.start_router()
        cluster.start_worker("prefill")
        async with RelayedDecode(cluster) as relayed, cluster.client() as client:
            ids = prompt(200)
            assert (await client.generate(ids, sampling={"max_tokens": 4, "ignore_eos": True})).ids == reference.greedy(
                tiny, ids, 4
            )
            before = relayed.relay.passed_up
            calls = [
                asyncio.ensure_future(client.generate(prompt(1500, seed=i), sampling={"max_tokens": 4}, timeout=20))
                for i in range(6)
            ]
            await eventually(lambda: relayed.relay.passed_up > before + 20_000, within=10)
            relayed.relay.swallow = True
            began = time.monotonic()
            await asyncio.sleep(1)
            relayed.relay.cut()
            relayed.relay.swallow = False
            results = await asyncio.gather(*calls, return_exceptions=True)
            assert time.monotonic() - began < 20
            for result in results:
                if isinstance(result, BaseException):
                    assert isinstance(result, grpc.aio.AioRpcError)
                    assert result.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
            await eventually(lambda: _answers(client, ids), within=10)
            await cluster.capacity_probe(client)
    finally:
        cluster.close()


async def _answers(client: Client, ids: list[int]) -> bool:
    try:
        await client.generate(ids, sampling={"max_tokens": 2, "ignore_eos": True}, timeout=5)
    except grpc.aio.AioRpcError:
        return False
    return True


@pytest.mark.timeout(120)
async def test_hnd_15_no_token_is_lost_or_doubled_at_the_seam(counting: Client) -> None:
    rng = random.Random(15)
    gate = asyncio.Semaphore(16)

    async def one() -> None:
        start, count, slow = rng.randrange(250), rng.randint(1, 20), rng.random() < 0.2
        async with gate:
            tokens = []
            async for event in counting.call([start], sampling={"max_tokens": count}):
                tokens.extend(event.delta.token_ids)
                if slow:
                    await asyncio.sleep(0.005)
        assert tokens == [(start + 1 + i) % 250 for i in range(count)]

    await asyncio.gather(*(one() for _ in range(300)))


@pytest.mark.timeout(90)
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_flt_03_and_04_a_killed_worker_ends_no_call_silently_and_holds_nothing(
    tiny: Path, tmp_path: Path, role: str
) -> None:
    args = ["--page-size", "4", "--pool-pages", "300", "--max-context", "512"]
    with Cluster(tmp_path, tiny, prefill=2, decode=2, worker_args=args, decode_args=["--lease", "3s"]) as cluster:
        async with cluster.client() as client:
            prompts = [prompt(30, seed=i) for i in range(8)]
            calls = [
                asyncio.ensure_future(client.generate(ids, sampling={"max_tokens": 150, "ignore_eos": True})) for ids in prompts
            ]
            await asyncio.sleep(0.3)
            victims = cluster.prefill if role == "prefill" else cluster.decode
            victims.pop(0).kill()
            for ids, answer in zip(prompts, await asyncio.gather(*calls), strict=True):
                assert answer.ids == reference.greedy(tiny, ids, 150)
            await cluster.capacity_probe(client, within=20)


async def test_flt_01_a_worker_restarted_on_the_same_port_is_used_at_once(tiny: Path, tmp_path: Path) -> None:
    args = ["--page-size", "4", "--pool-pages", "100", "--max-context", "128"]
    listen = f"127.0.0.1:{free_port()}"
    cluster = Cluster(tmp_path, tiny, decode=0, worker_args=args)
    try:
        cluster.start_router()
        cluster.start_worker("prefill")
        first = cluster.start_worker("decode", listen=listen)
        await asyncio.to_thread(cluster.router.wait_for_line, "router ready on")
        async with cluster.client() as client:
            ids = prompt(10)
            await client.generate(ids, sampling={"max_tokens": 4})
            cluster.decode.remove(first)
            first.kill()
            second = cluster.start_worker("decode", listen=listen)
            await asyncio.to_thread(second.wait_for_line, "decode worker ready on")
            await eventually(lambda: _answers(client, ids), within=10)
            for i in range(20):
                answer = await client.generate(prompt(10, seed=i), sampling={"max_tokens": 4, "ignore_eos": True}, timeout=10)
                assert answer.ids == reference.greedy(tiny, prompt(10, seed=i), 4)
            await cluster.assert_idle(client)
    finally:
        cluster.close()


async def test_a_paused_decode_worker_delays_and_loses_nothing(tiny: Path, tmp_path: Path) -> None:
    args = ["--page-size", "4", "--pool-pages", "100", "--max-context", "256"]
    with Cluster(tmp_path, tiny, worker_args=args) as cluster:
        async with cluster.client() as client:
            ids = prompt(20)
            call = client.call(ids, sampling={"max_tokens": 100, "ignore_eos": True})
            first = await first_event(call, "delta")
            cluster.decode[0].pause()
            await asyncio.sleep(0.5)
            cluster.decode[0].resume()
            rest = [token async for event in call for token in event.delta.token_ids]
            assert [*first.delta.token_ids, *rest] == reference.greedy(tiny, ids, 100)
            await cluster.assert_idle(client)
