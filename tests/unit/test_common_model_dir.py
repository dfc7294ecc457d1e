"""A model folder is taken or refused, in one line that says which file and why."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from common.errors import StartError
from common.model_dir import ModelDir

pytestmark = pytest.mark.unit

CONFIG = {"architectures": ["LlamaForCausalLM"], "vocab_size": 10, "max_position_embeddings": 32}
VOCABULARY = {"model": {"type": "BPE", "vocab": {"a": 0, "</s>": 2}}, "added_tokens": [{"id": 5, "content": "<end>"}]}


def folder_of(root: Path, **files: Any) -> Path:
    """A whole model folder. files: by stem; None leaves it out, a str is written as it is."""
    folder = root / "some model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"")
    for stem, content in ({"config": CONFIG, "tokenizer": VOCABULARY} | files).items():
        if content is not None:
            (folder / f"{stem}.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def refusal(path: Path | str, **needs: bool) -> str:
    with pytest.raises(StartError) as caught:
        ModelDir.open(path, **needs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_whole_folder_is_read(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    model = ModelDir.open(str(folder))
    assert (model.path, model.name, model.vocab_size, model.max_context) == (folder, "some model", 10, 32)
    assert model.weight_files == (folder / "model.safetensors",) and model.config == CONFIG
    assert (model.eos_token_ids, model.chat_template, model.special_tokens) == ((), None, {})


def test_lif_09_a_missing_path_a_file_and_an_empty_folder_are_named(tmp_path: Path) -> None:
    assert refusal(tmp_path / "no") == f"model path {tmp_path / 'no'} does not exist"
    (tmp_path / "file").touch()
    assert refusal(tmp_path / "file") == f"model path {tmp_path / 'file'} is a file, must be a folder"
    assert "does not exist" in refusal(tmp_path / "file" / "below") or "is a file" in refusal(tmp_path / "file" / "below")
    (tmp_path / "empty").mkdir()
    assert refusal(tmp_path / "empty") == f"model folder {tmp_path / 'empty'} is empty"
    assert refusal("") == "model path is empty"


def test_lif_09_each_missing_part_is_named(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    (folder / "model.safetensors").unlink()
    assert refusal(folder) == f"model folder {folder} has no *.safetensors weights"
    assert ModelDir.open(folder, need_weights=False).weight_files == ()
    (folder / "tokenizer.json").unlink()
    assert refusal(folder, need_weights=False) == f"model folder {folder} has no tokenizer.json"
    assert ModelDir.open(folder, need_weights=False, need_tokenizer=False).vocab_size == 10
    (folder / "config.json").rename(folder / "other.json")
    assert refusal(folder) == f"model folder {folder} has no config.json"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_lif_09_a_folder_or_file_without_permission_is_named(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    (folder / "model.safetensors").chmod(0)
    assert refusal(folder) == f"cannot read {folder / 'model.safetensors'}: Permission denied"
    folder.chmod(0)
    assert "Permission denied" in refusal(folder)
    folder.chmod(0o700)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (PermissionError(13, "Permission denied"), "cannot read model folder {}: Permission denied"),
        (OSError(5, "Input/output error"), "cannot read model folder {}: Input/output error"),
    ],
)
def test_lif_09_a_folder_that_cannot_be_listed_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError, message: str
) -> None:
    def refuse(_: Path) -> None:
        raise error

    monkeypatch.setattr(Path, "iterdir", refuse)
    assert refusal(folder_of(tmp_path)) == message.format(tmp_path / "some model")


@pytest.mark.parametrize("text", ["{", "", "[]", "null", "\x00", "[" * 100_000])
@pytest.mark.parametrize("stem", ["config", "tokenizer", "tokenizer_config", "generation_config", "special_tokens_map"])
def test_broken_json_is_named_whatever_file_it_is_in(tmp_path: Path, stem: str, text: str) -> None:
    folder = folder_of(tmp_path, **{stem: text})
    assert str(folder / f"{stem}.json") in refusal(folder)


def test_a_file_that_is_no_utf_8_is_named(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    (folder / "config.json").write_bytes(b'{"a": "\xff"}')
    assert refusal(folder) == f"{folder / 'config.json'} is not UTF-8 text: invalid start byte at byte 7"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "architecture must be LlamaForCausalLM or Qwen3ForCausalLM, got ['GPT2LMHeadModel']",
        ),
        ({"architectures": None}, "architecture must be LlamaForCausalLM or Qwen3ForCausalLM, got None"),
        ({"architectures": "LlamaForCausalLM"}, "architecture must be"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantized weights are not supported"),
        ({"vocab_size": None}, "vocab_size must be a positive integer, got None"),
        ({"vocab_size": True}, "vocab_size must be a positive integer, got True"),
        ({"max_position_embeddings": 0}, "max_position_embeddings must be a positive integer, got 0"),
        ({"max_position_embeddings": "32"}, "max_position_embeddings must be a positive integer, got '32'"),
        ({"eos_token_id": 10}, "end token id must be in [0, 10), got 10"),
        ({"eos_token_id": -1}, "end token id must be in [0, 10), got -1"),
        ({"eos_token_id": [1, [2]]}, "end token id must be in [0, 10), got [2]"),
        ({"eos_token_id": "2"}, "end token id must be in [0, 10), got '2'"),
        ({"eos_token_id": True}, "end token id must be in [0, 10), got True"),
    ],
)
def test_a_config_that_cannot_be_served_says_what_is_wrong(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    folder = folder_of(tmp_path, config=CONFIG | change)
    assert words in refusal(folder) and str(folder / "config.json") in refusal(folder)


@pytest.mark.parametrize(
    ("files", "ids"),
    [
        ({}, ()),
        ({"config": CONFIG | {"eos_token_id": 3}}, (3,)),
        ({"config": CONFIG | {"eos_token_id": [4, 3, 4]}}, (3, 4)),
        ({"config": CONFIG | {"eos_token_id": 3}, "generation_config": {"eos_token_id": [7, 8]}}, (7, 8)),
        ({"config": CONFIG | {"eos_token_id": 3}, "generation_config": {"eos_token_id": None}}, (3,)),
        ({"config": CONFIG | {"eos_token_id": 3}, "tokenizer_config": {"eos_token": "</s>"}}, (2, 3)),
        ({"tokenizer_config": {"eos_token": {"content": "<end>", "lstrip": False}}}, (5,)),
        ({"special_tokens_map": {"eos_token": {"content": "</s>"}}}, (2,)),
        ({"special_tokens_map": {"eos_token": "</s>"}, "tokenizer_config": {"eos_token": "<end>"}}, (5,)),
        ({"tokenizer_config": {"eos_token": "<new>", "added_tokens_decoder": {"6": {"content": "<new>"}}}}, (6,)),
        ({"tokenizer_config": {"eos_token": "<new>", "added_tokens_decoder": {"6": "<new>"}}}, (6,)),
    ],
)
def test_lif_11_end_tokens_are_found_in_every_form(tmp_path: Path, files: dict[str, Any], ids: tuple[int, ...]) -> None:
    assert ModelDir.open(folder_of(tmp_path, **files)).eos_token_ids == ids


def test_lif_11_a_unigram_vocabulary_is_a_list(tmp_path: Path) -> None:
    vocabulary = {"model": {"type": "Unigram", "vocab": [["<unk>", 0.0], ["</s>", -1.0]]}}
    folder = folder_of(tmp_path, tokenizer=vocabulary, tokenizer_config={"eos_token": "</s>"})
    assert ModelDir.open(folder).eos_token_ids == (1,)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"eos_token": 5}, "eos_token must be a string or a map"),
        ({"bos_token": ["<s>"]}, "bos_token must be a string or a map"),
        ({"bos_token": {"text": "<s>"}}, "bos_token must be a string or a map"),
        ({"additional_special_tokens": "<x>"}, "additional_special_tokens must be a list or a map"),
        ({"extra_special_tokens": [5]}, "extra_special_tokens must be a string or a map"),
        ({"added_tokens_decoder": ["<x>"]}, "added_tokens_decoder must map token ids"),
        ({"added_tokens_decoder": {"x": {"content": "<x>"}}}, "added_tokens_decoder must map token ids"),
        ({"added_tokens_decoder": {"6": {}}}, "added_tokens_decoder must map token ids"),
        ({"chat_template": 5}, "chat_template must be a string or a list"),
        ({"chat_template": ["x"]}, "chat_template must be a string or a list"),
        ({"eos_token": "<nowhere>"}, "does not have the eos_token '<nowhere>'"),
    ],
)
def test_lif_11_a_form_nobody_knows_stops_the_start(tmp_path: Path, config: dict[str, Any], words: str) -> None:
    folder = folder_of(tmp_path, tokenizer_config=config)
    assert words in refusal(folder) and "tokenizer_config.json" in refusal(folder)


def test_lif_11_special_tokens_are_texts_by_role(tmp_path: Path) -> None:
    config = {"eos_token": {"content": "</s>"}, "bos_token": None, "pad_token": "<pad>", "add_bos_token": True}
    assert ModelDir.open(folder_of(tmp_path, tokenizer_config=config)).special_tokens == {
        "eos_token": "</s>",
        "pad_token": "<pad>",
    }


def test_the_chat_template_is_found_in_every_form(tmp_path: Path) -> None:
    named = [{"name": "rag", "template": "R"}, {"name": "default", "template": "D"}]
    folder = folder_of(tmp_path, tokenizer_config={"chat_template": named})
    assert ModelDir.open(folder).chat_template == "D"
    (folder / "tokenizer_config.json").write_text('{"chat_template": "T"}')
    assert ModelDir.open(folder).chat_template == "T"
    (folder / "chat_template.jinja").write_text("J")
    assert ModelDir.open(folder).chat_template == "J"


def test_the_index_says_which_weight_files_count(tmp_path: Path) -> None:
    index = {"weight_map": {"x": "b.safetensors", "y": "a.safetensors", "z": "a.safetensors"}}
    folder = folder_of(tmp_path, **{"model.safetensors.index": index})
    (folder / "a.safetensors").touch()
    assert refusal(folder) == f"model folder {folder} has no b.safetensors, which its index names"
    (folder / "b.safetensors").touch()
    (folder / "consolidated.safetensors").touch()
    assert ModelDir.open(folder).weight_files == (folder / "a.safetensors", folder / "b.safetensors")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": []}')
    assert "weight_map must map tensors to files" in refusal(folder)
    (folder / "model.safetensors.index.json").unlink()
    assert ModelDir.open(folder).weight_files == (folder / "model.safetensors",)


def test_a_link_keeps_its_own_name(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(folder_of(tmp_path))
    assert ModelDir.open(tmp_path / "link").name == "link"
