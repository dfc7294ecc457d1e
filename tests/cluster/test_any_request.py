"""Requests of every shape at once, in too small pools, some of them ended early: each answer is what the definitions say.

FUZZ_SEED=7 make test-faults TESTS=tests/cluster/test_any_request.py        the same requests again
"""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path

import grpc
import pytest

from common.rpc.gen.pdserve.v1 import generation_pb2 as pb
from tests.helpers.any_request import AnyRequest
from tests.helpers.client import Answer, Client
from tests.helpers.cluster import Cluster
from tests.helpers.tiny_model import make_tiny_model
from tests.helpers.verdict import Judge

pytestmark = pytest.mark.cluster

SHORT, LONG = 120, 3000
POOL = ["--page-size", "4", "--pool-pages", "48", "--max-context", "100", "--max-running", "6"]


@pytest.mark.parametrize("split", [True, False], ids=["prefill and decode", "local prefill"])
@pytest.mark.timeout(120)
async def test_every_answer_is_what_the_definitions_say(tmp_path: Path, split: bool) -> None:
    await answers(tmp_path, count=SHORT, seed=int(os.environ.get("FUZZ_SEED", "1")), split=split)


@pytest.mark.long
@pytest.mark.parametrize("split", [True, False], ids=["prefill and decode", "local prefill"])
@pytest.mark.timeout(900)
async def test_every_one_of_thousands_of_answers_is_what_the_definitions_say(tmp_path: Path, split: bool) -> None:
    seed = int(os.environ.get("FUZZ_SEED", random.SystemRandom().randrange(2**32)))
    await answers(tmp_path, count=LONG, seed=seed, split=split)


async def answers(folder: Path, *, count: int, seed: int, split: bool) -> None:
    print(f"FUZZ_SEED={seed}")
    rng = random.Random(seed)
    model = make_tiny_model(folder / "model", eos=[383, 17, 101])
    judge, source, gate = Judge(model), AnyRequest(rng), asyncio.Semaphore(16)
    made = [(source.make(), rng.random()) for _ in range(count)]
    kinds = {"prefill": 1, "decode": 2} if split else {"prefill": 0, "decode": 1}
    chunks = ["--chunk-tokens", "7"]
    sides = {"prefill_args": chunks} if split else {"decode_args": ["--local-prefill", "always", *chunks]}
    with Cluster(folder, model, worker_args=POOL, **kinds, **sides) as cluster:  # type: ignore[arg-type]
        async with cluster.client() as client:

            async def one(request: pb.GenerateRequest, fate: float) -> None:
                async with gate:
                    answer = await ask(client, request, fate)
                for number, completion in answer.completions.items():
                    if completion.finished is None or completion.reason == "ABORT":
                        continue
                    faults = judge.faults(request, number, completion)
                    assert not faults, f"FUZZ_SEED={seed}, completion {number}: {faults} of\n{request}"

            await asyncio.gather(*(one(request, fate) for request, fate in made))
            await cluster.assert_idle(client)


async def ask(client: Client, request: pb.GenerateRequest, fate: float) -> Answer:
    """fate: a tenth are cancelled, a tenth aborted, at some moment; some find the caches flushed."""
    answer = Answer()
    call = client.stub.Generate(request, timeout=90)
    if 0.2 <= fate < 0.25:
        await client.flush()
    try:
        async for event in call:
            answer.add(event)
            if fate < 0.1 and len(answer.completions) >= request.n:
                call.cancel()
            elif fate < 0.2:
                await client.stub.Abort(pb.AbortRequest(request_id=answer.request_id), timeout=10)
    except asyncio.CancelledError:
        assert fate < 0.1
    except grpc.aio.AioRpcError as error:
        assert fate < 0.1 and error.code() is grpc.StatusCode.CANCELLED, error
    else:
        assert set(answer.completions) == set(range(max(1, request.n)))
        assert all(completion.finished is not None for completion in answer.completions.values())
    return answer
