"""The default model, as a new user gets it: fetched, converted, served, and the same tokens as transformers'."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from common.model_dir import ModelDir
from common.rpc.gen.pdserve.v1 import generation_pb2 as pb
from deploy.fetch_model import default_model
from tests.helpers.cluster import Cluster

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = ("The capital of France is", "def fibonacci(n):", "Once upon a time, in a village by the sea, " * 40)
NEW_TOKENS = 24
# In a process of its own: two copies of the weights and of torch's threads are enough.
REFERENCE = """
import json, sys, torch
from transformers import AutoModelForCausalLM
folder, new, *prompts = sys.argv[1], int(sys.argv[2]), *map(json.loads, sys.argv[3:])
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
for ids in prompts:
    done = model.generate(torch.tensor([ids]), max_new_tokens=new, do_sample=False, eos_token_id=-1)
    print(json.dumps(done[0, len(ids):].tolist()))
"""


@pytest.fixture(scope="module")
def model() -> Path:
    return default_model()


def test_the_folder_ends_where_an_answer_ends_and_takes_chats(model: Path) -> None:
    folder = ModelDir.open(model)
    assert (folder.vocab_size, folder.max_context, folder.eos_token_ids) == (49152, 8192, (2,))
    assert folder.special_tokens["eos_token"] == "<|im_end|>"
    assert folder.chat_template is not None
    assert folder.config["dtype"] == "float32"


@pytest.mark.timeout(300)
async def test_it_answers_as_transformers_does_token_for_token(model: Path, tmp_path: Path) -> None:
    with Cluster(tmp_path, model, worker_args=["--max-context", "2048", "--pool-memory-mb", "256"]) as cluster:
        async with cluster.client() as client:
            tokenized = [await client.stub.Tokenize(pb.TokenizeRequest(text=text), timeout=5) for text in PROMPTS]
            prompts = [list(response.token_ids) for response in tokenized]
            sampling = {"max_tokens": NEW_TOKENS, "ignore_eos": True}
            answers = [(await client.generate(ids, sampling=sampling)).ids for ids in prompts]
            chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="What is the capital of France?")])
            assert (await client.generate(chat, sampling={"max_tokens": 32})).text == "The capital of France is Paris."
            await cluster.assert_idle(client)
    command = [sys.executable, "-c", REFERENCE, str(model), str(NEW_TOKENS), *map(str, prompts)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert answers == [json.loads(line) for line in done.stdout.splitlines()]
