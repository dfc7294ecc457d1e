"""What is wrong with a model's folder is one line at the start, and what is only written in another form is no fault."""

from __future__ import annotations

import ctypes
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from common.rpc.gen.pdserve.v1 import generation_pb2 as pb
from tests.helpers.client import Client
from tests.helpers.cluster import Cluster
from tests.helpers.process import ROOT, Process
from tests.helpers.tiny_model import BOS, EOS, make_tiny_model

pytestmark = pytest.mark.cluster

BOS_ID, EOS_ID = 382, 383
WRONG = {
    "missing": "{} does not exist",
    "a file": "{} is a file",
    "empty folder": "{} is empty",
    "no config": "{} has no config.json",
    "no weights": "{} has no",
    "missing tensor": "model.layers.1.mlp.down_proj.weight",
    "other architecture": "GPT2LMHeadModel",
}
"""What the last line of output says of each."""


def make_wrong(model: Path, case: str) -> None:
    if case == "missing":
        return
    if case == "a file":
        model.write_text("x")
        return
    if case == "empty folder":
        model.mkdir()
        return
    make_tiny_model(model, config={"architectures": ["GPT2LMHeadModel"]} if case == "other architecture" else None)
    weights = model / "model.safetensors"
    if case == "no config":
        (model / "config.json").unlink()
    elif case == "no weights":
        weights.unlink()
    elif case == "missing tensor":
        tensors = load_file(weights)
        del tensors["model.layers.1.mlp.down_proj.weight"]
        save_file(tensors, weights)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """Where everybody would look a model up; nobody may."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        for name in ("HF_ENDPOINT", "http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{listening.getsockname()[1]}")
        yield listening
        listening.settimeout(0)
        with pytest.raises(BlockingIOError):
            listening.accept()


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize("case", WRONG)
def test_lif_09_a_wrong_model_path_says_so_in_one_line_and_asks_no_network(tmp_path: Path, case: str) -> None:
    model = tmp_path / "model"
    make_wrong(model, case)
    args = ["--model", str(model), "--listen", "127.0.0.1:0"]
    started = [
        Process(f"{role}_worker", [*args, "--router", "127.0.0.1:1"], log=tmp_path / role) for role in ("prefill", "decode")
    ]
    if case not in ("no weights", "missing tensor"):  # A router needs no weights.
        started.append(Process("router", args, log=tmp_path / "router"))
    for process in started:
        assert process.wait(within=20) == 2
        assert_one_line(process.output, model, WRONG[case].format(model))


def assert_one_line(output: str, model: Path, said: str) -> None:
    last = output.strip().splitlines()[-1]
    assert last.startswith("error: ") and str(model) in last and said in last, last
    assert "Traceback" not in output


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize(
    ("module", "file"), [("router", "."), ("router", "tokenizer.json"), ("decode_worker", "model.safetensors")]
)
def test_lif_09_what_may_not_be_read_is_named(tmp_path: Path, module: str, file: str) -> None:
    model = make_tiny_model(tmp_path / "model")
    (model / file).chmod(0)
    try:
        args = ["--model", str(model), "--listen", "127.0.0.1:0", *(["--router", "127.0.0.1:1"] if module != "router" else [])]
        done = subprocess.run(
            [sys.executable, "-m", module, *args],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
            preexec_fn=obey_permissions,
        )
    finally:
        (model / file).chmod(0o755)
    assert done.returncode == 2
    assert_one_line(done.stderr, model / file, "ermission denied")


def obey_permissions() -> None:
    """For root, whom they otherwise do not stop: gives up CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH at exec."""
    if os.geteuid() == 0:
        drop_from_bounding_set = 24
        for capability in (1, 2):
            ctypes.CDLL(None).prctl(drop_from_bounding_set, capability, 0, 0, 0)


def special(text: str, **fields: Any) -> dict[str, Any]:
    """As transformers saves an AddedToken."""
    return {"__type": "AddedToken", "content": text, "special": True, "lstrip": False, "rstrip": False} | fields


FORMS: dict[str, tuple[dict[str, Any], dict[str, Any], list[int]]] = {
    "maps and a list of ends": (
        {"bos_token": special(BOS), "eos_token": special(EOS), "extra_special_tokens": {"tool": "th"}},
        {"eos_token_id": [EOS_ID, 65]},
        [65, EOS_ID],
    ),
    "no start token and added ones": (
        {"bos_token": None, "added_tokens_decoder": {str(EOS_ID): special(EOS), str(BOS_ID): special(BOS)}},
        {"bos_token_id": None, "eos_token_id": EOS_ID},
        [EOS_ID],
    ),
}
"""tokenizer_config.json, generation_config.json, and the tokens that end an answer."""


@pytest.mark.parametrize("form", FORMS)
async def test_lif_11_special_tokens_in_any_form_load_and_mean_the_same(tmp_path: Path, form: str) -> None:
    tokenizer, generation, ends = FORMS[form]
    model = make_tiny_model(tmp_path / "model")
    rewrite(model / "tokenizer_config.json", tokenizer)
    rewrite(model / "generation_config.json", generation)
    args = ["--pool-pages", "64", "--max-context", "256", "--local-prefill", "always"]
    with Cluster(tmp_path, model, prefill=0, decode_args=args) as cluster:
        async with cluster.client() as client:
            assert sorted((await client.model()).eos_token_ids) == ends
            chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="a th b")])
            ids = (await client.stub.Tokenize(pb.TokenizeRequest(chat=chat), timeout=5)).token_ids
            text = await client.stub.Detokenize(pb.DetokenizeRequest(token_ids=ids, include_special_tokens=True), timeout=5)
            assert text.text == "<|im_start|>user\na th b<|im_end|>\n<|im_start|>assistant\n"
            assert (ids[0], list(ids).count(BOS_ID), list(ids).count(EOS_ID)) == (BOS_ID, 2, 1)
            for token in (*ends, 66):
                assert await ended_by(client, chat, token) is (token in ends)
            await cluster.assert_idle(client)


async def ended_by(client: Client, chat: pb.Chat, token: int) -> bool:
    """Whether a token that cannot but come ends the answer."""
    answer = await client.generate(chat, sampling={"max_tokens": 3, "logit_bias": {token: 100.0}})
    return (len(answer.ids), answer.reason) == (1, "STOP")


def rewrite(path: Path, changes: dict[str, Any]) -> None:
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in values.items() if value is not None}))


@pytest.mark.parametrize(
    "content", ["{", "[]", json.dumps({"eos_token": 7}), json.dumps({"eos_token": "no such token"})], ids=range(4)
)
def test_lif_11_a_tokenizer_config_that_makes_no_sense_stops_the_start(tmp_path: Path, content: str) -> None:
    model = make_tiny_model(tmp_path / "model")
    (model / "tokenizer_config.json").write_text(content)
    command = [sys.executable, "-m", "router", "--model", str(model), "--listen", "127.0.0.1:0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: ") and "tokenizer_config.json" in last and str(model) in last, last
