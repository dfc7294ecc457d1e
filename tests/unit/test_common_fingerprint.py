"""Two folders have one fingerprint exactly if they hold the same model."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from common import fingerprint as module
from common.errors import StartError
from common.fingerprint import fingerprint
from common.model_dir import ModelDir
from tests.helpers.text_models import byte_level, write_model

pytestmark = pytest.mark.unit


def write_weights(path: Path, sizes: list[int]) -> None:
    """A safetensors file of sparse zeros: one uint8 tensor per size."""
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    header = json.dumps(
        {
            f"t{i}": {"dtype": "U8", "shape": [n], "data_offsets": [end - n, end]}
            for i, (n, end) in enumerate(zip(sizes, ends, strict=True))
        }
    ).encode()
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + sum(sizes))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_model(tmp_path / "model", byte_level(), tokenizer_config={"eos_token": "<|end|>"}, chat_template="{{ messages }}")
    write_weights(tmp_path / "model" / "model.safetensors", [100, 5000])
    return tmp_path / "model"


def of(folder: Path) -> str:
    return fingerprint(ModelDir.open(folder))


def flip(path: Path, offset: int) -> None:
    """Changes one byte; offset from the end if negative."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def test_a_copy_under_another_name_has_the_same_fingerprint(folder: Path) -> None:
    copy = shutil.copytree(folder, folder.parent / "copy")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(dict(reversed(config.items())), indent=4))
    assert of(copy) == of(folder)
    assert len(of(folder)) == 16 and int(of(folder), 16) >= 0


CHANGES: dict[str, Callable[[Path], None]] = {
    "config": lambda folder: edit(folder / "config.json", "256", "128"),
    "tokenizer": lambda folder: edit(folder / "tokenizer.json", "<plain", "<plane"),
    "tokenizer config": lambda folder: edit(folder / "tokenizer_config.json", "end|", "start|"),
    "template": lambda folder: edit(folder / "chat_template.jinja", "{{", "x{{"),
    "no template": lambda folder: (folder / "chat_template.jinja").unlink(),
    "generation config": lambda folder: write(folder / "generation_config.json", '{"eos_token_id": 3}'),
    "one byte of a weight": lambda folder: flip(folder / "model.safetensors", -3000),
    "a tensor's name": lambda folder: edit_bytes(folder / "model.safetensors", b'"t1"', b'"t2"'),
}


def write(path: Path, text: str) -> None:
    path.write_text(text)


def edit(path: Path, old: str, new: str) -> None:
    edit_bytes(path, old.encode(), new.encode())


def edit_bytes(path: Path, old: bytes, new: bytes) -> None:
    assert old in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(old, new))


@pytest.mark.parametrize("name", CHANGES)
def test_cmp_03_any_one_difference_changes_the_fingerprint(folder: Path, name: str) -> None:
    before = of(folder)
    CHANGES[name](folder)
    assert of(folder) != before


@pytest.mark.parametrize("offset", [-1, -5000, -5001, -5100, -30_000])
def test_of_a_large_file_every_tensors_ends_and_middle_count(folder: Path, monkeypatch: pytest.MonkeyPatch, offset: int) -> None:
    weights = folder / "model.safetensors"
    write_weights(weights, [100, 50_000, 1, 5000])
    monkeypatch.setattr(module, "WHOLE_BYTES", 1000)
    before = of(folder)
    flip(weights, offset)
    assert of(folder) != before


def test_half_a_gigabyte_takes_less_than_a_second(folder: Path) -> None:
    write_weights(folder / "model.safetensors", [1_800_000] * 272)
    model = ModelDir.open(folder)
    started = time.perf_counter()
    fingerprint(model)
    assert time.perf_counter() - started < 1


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda data: data[:-1], "is cut or damaged: it has"),
        (lambda data: data + b"x", "is cut or damaged: it has"),
        (lambda data: b"", "is not a safetensors file"),
        (lambda data: b"version https://git-lfs.github.com/spec/v1\n", "is not a safetensors file"),
        (lambda data: data[:8] + b"[" + data[9:], "is not a safetensors file"),
        (lambda data: data.replace(b"5100", b'"xx"'), "is not a safetensors file"),
    ],
)
def test_a_weight_file_that_is_cut_or_broken_stops_the_start(folder: Path, damage: Callable[[bytes], bytes], words: str) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(damage(weights.read_bytes()))
    with pytest.raises(StartError, match=words) as caught:
        of(folder)
    assert str(weights) in str(caught.value)
