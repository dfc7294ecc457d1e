"""Simulated workers behind a real router: the right words, real pages and handoffs, no torch."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from common.rpc.gen.pdserve.v1 import generation_pb2 as pb
from tests.helpers.client import Answer, Client, first_event
from tests.helpers.cluster import Cluster
from tests.helpers.eventually import eventually
from tests.helpers.process import ROOT, Process
from tests.helpers.prompts import prompt
from tests.helpers.sim import FAST, SIM, assert_expected
from tests.helpers.text_models import byte_level, write_model

pytestmark = pytest.mark.cluster
SHAPE = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 384, "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5, "eos_token_id": 300,
}  # fmt: skip
IGNORE = {"ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without weights, which nobody needs."""
    folder = tmp_path_factory.mktemp("models") / "sim"
    write_model(folder, byte_level(), config=SHAPE)
    return folder


@pytest.fixture(scope="module")
def sims(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two of each, with pools that a hundred requests do not fit."""
    with Cluster(
        tmp_path_factory.mktemp("sims"),
        model,
        prefill=2,
        decode=2,
        worker_args=[*FAST, "--page-size", "16", "--pool-pages", "400"],
        prefill_args=["--verify-handoff"],
    ) as running:
        yield running


@pytest.fixture
async def client(sims: Cluster) -> AsyncIterator[Client]:
    async with sims.client() as connected:
        yield connected
        await sims.assert_idle(connected)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "seed": 11}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("n", [1, 3])
async def test_the_answer_is_the_expected_one_and_its_text_is_its_tokens(
    client: Client, model: Path, sampling: dict[str, float | int], n: int
) -> None:
    ids = prompt(100, seed=n)
    answer = await client.generate(ids, sampling={"max_tokens": 40, **IGNORE, **sampling}, n=n)
    assert_expected(answer, ids, 40, model=model, **sampling)
    words = Tokenizer.from_file(str(model / "tokenizer.json"))
    assert [completion.text for completion in answer.completions.values()] == [
        words.decode(completion.ids) for completion in answer.completions.values()
    ]


async def test_a_repeated_prompt_is_found_in_the_prefix_cache(client: Client, model: Path) -> None:
    ids = prompt(200, seed=5)
    for _ in range(3):
        answer = await client.generate(ids, sampling={"max_tokens": 5, **IGNORE})
        assert_expected(answer, ids, 5, model=model)
    assert answer.usage.cached_tokens == 192


async def test_many_at_once_more_than_the_pools_hold(client: Client, model: Path) -> None:
    """Back-pressure, retraction and eviction are the real ones."""

    async def ask(which: int) -> None:
        ids = prompt(20 + which * 7 % 300, seed=which)
        answer = await client.generate(ids, sampling={"max_tokens": 60, "temperature": 1.0, "seed": which, **IGNORE})
        assert_expected(answer, ids, 60, model=model, temperature=1.0, seed=which)

    await asyncio.gather(*(ask(which) for which in range(120)))


async def test_a_cancelled_request_gives_everything_back(client: Client) -> None:
    call = client.call(prompt(500, seed=1), sampling={"max_tokens": 3000, **IGNORE})
    await first_event(call, "delta")
    call.cancel()


@pytest.mark.timeout(60)
async def test_workers_that_prefill_for_themselves_are_simulated_too(model: Path, tmp_path: Path) -> None:
    with Cluster(tmp_path, model, prefill=0, decode=2, worker_args=FAST, decode_args=["--local-prefill", "always"]) as cluster:
        async with cluster.client() as client:
            prompts = [prompt(700, seed=which) for which in range(10)]
            answers = await asyncio.gather(
                *(client.generate(ids, sampling={"max_tokens": 20, "temperature": 1.0, "seed": 3, **IGNORE}) for ids in prompts)
            )
            for ids, answer in zip(prompts, answers, strict=True):
                assert_expected(answer, ids, 20, model=model, temperature=1.0, seed=3)
            await cluster.assert_idle(client)


async def read(call: AsyncIterator[pb.GenerateResponse], answer: Answer) -> None:
    async for event in call:
        answer.add(event)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_killed_worker_costs_no_token(model: Path, tmp_path: Path, role: str) -> None:
    with Cluster(tmp_path, model, prefill=2, decode=2, worker_args=SIM) as cluster:
        async with cluster.client() as client:
            process_of = await cluster.workers_by_id(client)
            prompts = [prompt(300, seed=which) for which in range(12)]
            calls = [client.call(ids, sampling={"max_tokens": 200, **IGNORE}) for ids in prompts]
            answers = [Answer() for _ in prompts]
            asking = [asyncio.create_task(read(call, answer)) for call, answer in zip(calls, answers, strict=True)]

            # Some are being decoded, and with one prompt a step some are still to be computed.
            await eventually(lambda: any(answer.completions for answer in answers), within=10, every=0.001)
            begun = next(answer.started for answer in answers if answer.started and answer.completions)
            process_of[begun.prefill_worker if role == "prefill" else begun.decode_worker].kill()
            await asyncio.gather(*asking)
            for ids, answer in zip(prompts, answers, strict=True):
                assert_expected(answer, ids, 200, model=model)
            if role == "decode":
                assert max(answer.only.end.timing.attempts for answer in answers) > 1
            await cluster.assert_idle(client, within=10)


async def test_a_real_worker_is_not_paired_with_simulated_ones(
    sims: Cluster, client: Client, model: Path, tmp_path: Path
) -> None:
    args = ["--model", str(model), "--router", sims.address, "--load-format", "dummy", "--page-size", "16", "--dtype", "bfloat16"]
    real = Process("decode_worker", args, log=tmp_path / "real.log")
    try:
        refused = await asyncio.to_thread(real.wait_for_line, r"dtype differs: 'bfloat16' on .*, 'simulated' on ", within=30)
        assert refused
    finally:
        real.kill()


CODE = """
import asyncio, sys
from pathlib import Path
from common.config import parse_config
from {role}_worker.config import Config

async def main():
    config = parse_config(Config, prog="x", description="", argv={argv!r}, env={{}})
    {start}
    print(*(name for name in ("torch", "numpy", "transformers") if name in sys.modules))
    print(next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS")) // 1024, file=sys.stderr)

asyncio.run(main())
"""
STARTS = {
    "prefill": "import prefill_worker.server as s; await s.PrefillServer(config, memory=s.make_memory(config)).worker.start()",
    "decode": "import decode_worker.server as s; await s.make_worker(config, memory=s.make_memory(config)).start()",
}


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_simulated_worker_imports_no_torch_and_stays_small(model: Path, role: str) -> None:
    code = CODE.format(role=role, argv=["--model", str(model), *SIM], start=STARTS[role])
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [], "a started simulated worker has these"
    assert int(done.stderr.split()[-1]) < 90, "MiB"
