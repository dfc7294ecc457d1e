"""What the serving benchmark launches is a value."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.geometries import GEOMETRIES, write_model
from bench.serving import options
from bench.serving.systems import System
from common.model_dir import ModelDir


def systems(*argv: str) -> list[System]:
    return options.systems(options.parse("", argv))


def test_a_running_cluster_is_only_attached_to() -> None:
    assert systems("open", "--router", "h:1") == [System("running", router="h:1")]


def test_split_and_colocated_have_as_many_workers_and_the_same_model() -> None:
    split, colocated = systems(
        "goodput", "--launch", "--compare", "colocated", "--model", "/m", "--device", "cuda", "--dtype", "float16",
        "--worker-args=--page-size 32", "--decode-args=--max-running 64", "--colocated-args=--chunk-tokens 512",
    )  # fmt: skip
    assert (split.name, colocated.name) == ("split-1p1d", "colocated-2")
    shared = ("--model", "/m", "--device", "cuda", "--log-level", "warning", "--dtype", "float16")
    assert split.launch == (
        *shared, "--prefill", "1", "--decode", "1",
        "--prefill-args=--page-size 32", "--decode-args=--page-size 32 --max-running 64",
    )  # fmt: skip
    assert colocated.launch == (
        *shared, "--prefill", "0", "--decode", "2", "--decode-args=--page-size 32 --max-running 64 --chunk-tokens 512",
    )  # fmt: skip


def test_without_prefill_workers_the_one_system_is_the_colocated_one() -> None:
    assert [system.name for system in systems("offline", "--launch", "--prefill", "0")] == ["colocated-1"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["open"], "give --router ADDRESS or --launch"),
        (["open", "--router", "h:1", "--launch"], "give --router ADDRESS or --launch"),
        (["goodput", "--router", "h:1", "--compare", "colocated"], "--compare needs --launch"),
        (["open", "--launch", "--input", "x"], "lengths must be like"),
        (["goodput", "--launch", "--slo", "x"], "an objective must be METRIC:pN:LIMIT"),
        (["open", "--launch", "--seconds", "0"], "must be more than 0, got 0"),
    ],
)
def test_what_cannot_be_measured_is_refused(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        options.parse("", argv)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_geometrys_name_becomes_a_folder_with_random_weights(tmp_path: Path) -> None:
    (system,) = systems("open", "--launch", "--model", "Llama-3-8B", "--out", str(tmp_path))
    folder = tmp_path / "models" / "Llama-3-8B"
    assert system.launch[:2] == ("--model", str(folder)) and system.launch[-6:-4] == ("--load-format", "dummy")
    assert ModelDir.open(folder, need_weights=False).vocab_size == 128256


@pytest.mark.parametrize("name", GEOMETRIES)
def test_a_geometry_is_written_whole_and_with_the_context_asked_for(name: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / name, name, max_context=4096)
    assert '"max_position_embeddings": 4096' in (folder / "config.json").read_text()
    assert (folder / "tokenizer.json").exists()
