"""The default model, as a new user gets it: fetched, converted, served, and the same tokens as transformers'."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from common.model_dir import ModelDir
from common.rpc.gen.pdserve.v1 import generation_pb2 as pb
from deploy.fetch_model import default_model
from tests.helpers.cluster import Cluster

ROOT = Path(__file__).resolve().parents[2]
LENGTHS = (1, 2, 3, 5, 8, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65, 100, 150, 200, 255, 256, 257, 500, 1000, 2000)
NEW_TOKENS = 64
SAMPLING = {"max_tokens": NEW_TOKENS, "ignore_eos": True}
# In a process of its own: two copies of the weights and of torch's threads are enough. One pass over prompt and output tells for
# every output token whether it is the most likely one after what precedes it: by induction, the greedy continuation.
REFERENCE = """
import json, sys, torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
with torch.inference_mode():
    for prompt, output in json.load(sys.stdin):
        logits = model(torch.tensor([prompt + output]), logits_to_keep=len(output) + 1).logits[0, :-1]
        print(json.dumps(logits.argmax(-1).tolist()))
"""

# A minute of two cores; many where they are shared.
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def model() -> Path:
    return default_model()


def test_the_folder_ends_where_an_answer_ends_and_takes_chats(model: Path) -> None:
    folder = ModelDir.open(model)
    assert (folder.vocab_size, folder.max_context, folder.eos_token_ids) == (49152, 8192, (2,))
    assert folder.special_tokens["eos_token"] == "<|im_end|>"
    assert folder.chat_template is not None
    assert folder.config["dtype"] == "float32"


async def test_it_answers_as_transformers_does_token_for_token(model: Path, tmp_path: Path) -> None:
    text = "".join((ROOT / name).read_text() for name in ("docs/architecture.md", "README.md"))
    with Cluster(
        tmp_path, model, worker_args=["--max-context", "2112", "--pool-memory-mb", "512", "--max-running", "16"]
    ) as cluster:
        async with cluster.client() as client:
            ids = list((await client.stub.Tokenize(pb.TokenizeRequest(text=text), timeout=5)).token_ids)
            prompts = [ids[7 * i : 7 * i + length] for i, length in enumerate(LENGTHS)]
            assert [len(prompt) for prompt in prompts] == list(LENGTHS)
            answers = await asyncio.gather(*(client.generate(prompt, sampling=SAMPLING, timeout=400) for prompt in prompts))
            outputs = [answer.ids for answer in answers]
            chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="What is the capital of France?")])
            assert (await client.generate(chat, sampling={"max_tokens": 32})).text == "The capital of France is Paris."
            await cluster.assert_idle(client)
    assert outputs == best_tokens(model, prompts, outputs)


def best_tokens(model: Path, prompts: list[list[int]], outputs: list[list[int]]) -> list[list[int]]:
    """At each place of each output, transformers' most likely token."""
    done = subprocess.run(
        [sys.executable, "-c", REFERENCE, str(model)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "2"},
        input=json.dumps(list(zip(prompts, outputs, strict=True))),
        capture_output=True,
        text=True,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]
