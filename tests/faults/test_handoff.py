"""The way of the KV from prefill to decode: refused, repeated, overtaken. test_transfers.py has what stalls."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import grpc
import pytest

from tests.helpers import reference
from tests.helpers.client import Client, first_event
from tests.helpers.cluster import Cluster
from tests.helpers.eventually import eventually
from tests.helpers.process import free_port
from tests.helpers.prompts import prompt
from tests.helpers.relayed import RelayedWorker

pytestmark = pytest.mark.faults


@pytest.mark.parametrize("transport", ["shm", "grpc"])
async def test_hnd_01_and_11_a_prompt_prefill_cannot_hold_is_an_error_that_names_the_limit(
    tiny: Path, tmp_path: Path, transport: str
) -> None:
    with Cluster(
        tmp_path,
        tiny,
        worker_args=["--page-size", "4", "--max-context", "256"],
        prefill_args=["--pool-pages", "16", "--transport", transport, "--chunk-tokens", "16"],
        decode_args=["--pool-pages", "64"],
    ) as cluster:
        async with cluster.client() as client:
            for length, max_tokens in ((65, 1), (65, 4), (67, 180), (68, 4), (100, 4)):
                code, message = await client.refusal(prompt(length), sampling={"max_tokens": max_tokens})
                assert code is grpc.StatusCode.OUT_OF_RANGE and "16 pages of 4 tokens (" in message
            for length, max_tokens in ((63, 1), (60, 4), (30, 34)):
                ids = prompt(length)
                answer = await client.generate(ids, sampling={"max_tokens": max_tokens, "ignore_eos": True})
                assert answer.ids == reference.greedy(tiny, ids, max_tokens) and answer.usage.prompt_tokens == length
            await cluster.assert_idle(client)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("times", [150, pytest.param(500, marks=pytest.mark.long)])
async def test_hnd_04_a_full_prefix_hit_still_completes_the_handoff(
    cluster: Cluster, client: Client, tiny: Path, times: int
) -> None:
    ids = prompt(32, seed=4)
    expected = reference.greedy(tiny, ids, 4)
    for _ in range(times):
        assert (await client.generate(ids, sampling={"max_tokens": 4, "ignore_eos": True})).ids == expected
    await cluster.capacity_probe(client)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("requests", "tokens"), [(200, 24), pytest.param(500, 64, marks=pytest.mark.long)])
@pytest.mark.parametrize("transport", ["shm", "grpc"])
async def test_hnd_05_output_does_not_decay_over_many_handoffs(
    tiny: Path, tmp_path: Path, transport: str, requests: int, tokens: int
) -> None:
    rng = random.Random(5)
    prompts = [prompt(length, seed=5) for length in rng.sample(range(1, 120), 20)]
    expected = [reference.greedy(tiny, ids, tokens) for ids in prompts]
    args = ["--page-size", "4", "--pool-pages", "320", "--max-context", "256"]
    with Cluster(tmp_path, tiny, worker_args=args, prefill_args=["--transport", transport]) as cluster:
        async with cluster.client() as client:
            gate = asyncio.Semaphore(8)

            async def one() -> None:
                which = rng.randrange(20)
                async with gate:
                    call = client.call(prompts[which], sampling={"max_tokens": tokens, "ignore_eos": True})
                    if rng.random() < 0.1:
                        await asyncio.sleep(rng.random() * 0.05)
                        call.cancel()
                        return
                    assert [token async for event in call for token in event.delta.token_ids] == expected[which]

            await asyncio.gather(*(one() for _ in range(requests)))
            await cluster.capacity_probe(client)


async def _answers(client: Client, ids: list[int]) -> bool:
    try:
        await client.generate(ids, sampling={"max_tokens": 2, "ignore_eos": True}, timeout=5)
    except grpc.aio.AioRpcError:
        return False
    return True


async def count_from_anywhere(client: Client, times: int, *, seed: int) -> set[str]:
    """Requests of a model that counts, 16 at once, some of them read slowly; which prefill workers took part."""
    rng = random.Random(seed)
    gate = asyncio.Semaphore(16)

    async def one() -> str:
        start, count, slow = rng.randrange(250), rng.randint(1, 20), rng.random() < 0.2
        async with gate:
            tokens, worker = [], ""
            async for event in client.call([start], sampling={"max_tokens": count}):
                worker = event.started.prefill_worker or worker
                tokens.extend(event.delta.token_ids)
                if slow:
                    await asyncio.sleep(0.005)
        assert tokens == [(start + 1 + i) % 250 for i in range(count)]
        return worker

    return set(await asyncio.gather(*(one() for _ in range(times))))


@pytest.mark.timeout(120)
async def test_hnd_15_no_token_is_lost_or_doubled_at_the_seam(counting: Client) -> None:
    await count_from_anywhere(counting, 300, seed=15)


@pytest.mark.timeout(120)
async def test_hnd_15_nor_when_decode_has_a_head_start(counting_cluster: Cluster, counting: Client) -> None:
    """A second prefill worker whose words come 50 ms late, each way, so that those of decode overtake token 0."""
    async with RelayedWorker(counting_cluster, "prefill") as late:
        late.relay.delay = 0.05
        assert len(await count_from_anywhere(counting, 200, seed=16)) == 2, "the late one has a part in this"
        counting_cluster.prefill.remove(late.process)
        assert await asyncio.to_thread(late.process.stop) == 0


@pytest.mark.timeout(90)
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_flt_03_and_04_a_killed_worker_ends_no_call_silently_and_holds_nothing(
    tiny: Path, tmp_path: Path, role: str
) -> None:
    args = ["--page-size", "4", "--pool-pages", "300", "--max-context", "512"]
    with Cluster(tmp_path, tiny, prefill=2, decode=2, worker_args=args, decode_args=["--lease", "3s"]) as cluster:
        async with cluster.client() as client:
            prompts = [prompt(30, seed=i) for i in range(8)]
            rules = [
                {"max_tokens": 150, "ignore_eos": True} | ({"temperature": 1.0, "seed": 7} if i % 2 else {}) for i in range(8)
            ]
            sampled = [await client.generate(prompts[i], sampling=rules[i]) for i in (1, 3)]
            calls = [asyncio.ensure_future(client.generate(ids, sampling=rule)) for ids, rule in zip(prompts, rules, strict=True)]
            await asyncio.sleep(0.3)
            victims = cluster.prefill if role == "prefill" else cluster.decode
            victims.pop(0).kill()
            answers = await asyncio.gather(*calls)
            for i in (0, 2, 4, 6):
                assert answers[i].ids == reference.greedy(tiny, prompts[i], 150)
            assert [answers[i].ids for i in (1, 3)] == [answer.ids for answer in sampled], "a seed's tokens too"
            assert all((answer.usage.prompt_tokens, answer.usage.completion_tokens) == (30, 150) for answer in answers)
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
