"""Several routers over the same workers: they share nothing, and send what belongs together to the same worker all the same."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import pytest

from tests.helpers.client import Client
from tests.helpers.cluster import Cluster
from tests.helpers.eventually import eventually
from tests.helpers.process import free_port
from tests.helpers.prompts import prompt
from tests.helpers.sim import FAST
from tests.helpers.text_models import byte_level, write_model

pytestmark = pytest.mark.cluster
SHAPE = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 384, "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5, "eos_token_id": 300,
}  # fmt: skip


async def test_two_routers_send_a_session_to_the_same_workers(tmp_path: Path) -> None:
    model, other = tmp_path / "model", f"127.0.0.1:{free_port()}"
    write_model(model, byte_level(), config=SHAPE)
    args = [*FAST, "--page-size", "16", "--pool-pages", "400", "--router", other]
    with Cluster(tmp_path, model, prefill=4, worker_args=args, decode=3, router_args=["--policy", "session"]) as cluster:
        second = cluster.start_router_at(other)
        await asyncio.to_thread(second.wait_for_line, "router ready on")
        async with cluster.client() as one, Client(other) as two:
            for client in (one, two):
                await eventually(partial(has_workers, client, 7), within=20)
            homes = [[await workers_of(client, i) for i in range(12)] for client in (one, two)]
            assert homes[0] == homes[1] and len(set(homes[0])) > 4
            await cluster.assert_idle(one)
            await cluster.assert_idle(two)
    second.kill()


async def has_workers(client: Client, count: int) -> bool:
    return len(await client.workers()) == count


async def workers_of(client: Client, which: int) -> tuple[str, str]:
    """Of a session that is the same for the same number."""
    answer = await client.generate(prompt(50, seed=which), sampling={"max_tokens": 2}, metadata={"x-session-id": f"chat {which}"})
    assert answer.started is not None
    return answer.started.prefill_worker, answer.started.decode_worker
