"""pyproject.toml, requirements.lock, the Makefile and the code agree."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
TARGETS = [
    *("setup", "protos", "run-local", "smoke", "chat", "top", "test", "test-unit", "test-faults", "test-faults-long", "test-gpu"),
    *("bench", "bench-cpu", "bench-router", "bench-serve", "bench-faults", "bench-gpu", "bench-sim", "soak"),
    *("fmt", "lint", "types", "clean", "help"),
]


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        return dict(tomllib.load(file)["project"])


def locked() -> dict[str, str]:
    lines = [line for line in (ROOT / "requirements.lock").read_text().splitlines() if line and not line.startswith("#")]
    pins = [line.split("==") for line in lines]
    assert all(len(pin) == 2 for pin in pins), "every line of the lock is name==version"
    return {canonicalize_name(name): version for name, version in pins}


def test_every_dependency_is_locked_at_a_version_it_allows(project: dict[str, Any]) -> None:
    pins = locked()
    wanted = [Requirement(text) for text in (*project["dependencies"], *project["optional-dependencies"]["dev"])]
    # torch is the user's choice (TORCH=), and the lock must not undo it.
    wrong = [
        str(want) for want in wanted if want.name != "torch" and pins.get(canonicalize_name(want.name), "") not in want.specifier
    ]
    assert wrong == []
    assert "torch" not in pins


def test_the_default_torch_is_one_that_the_project_allows(project: dict[str, Any]) -> None:
    found = re.search(r"^TORCH \?= (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert found is not None
    (allowed,) = (Requirement(text) for text in project["dependencies"] if text.startswith("torch"))
    (pin,) = Requirement(found[1]).specifier
    assert pin.version in allowed.specifier


def test_flashinfer_is_in_the_extra_cuda_alone(project: dict[str, Any]) -> None:
    extras = project["optional-dependencies"]
    assert [text for text in extras["cuda"] if text.startswith("flashinfer-python")] == ["flashinfer-python==0.6.13"]
    assert not any("flashinfer" in text for text in (*project["dependencies"], *extras["dev"], *locked()))


def test_matplotlib_is_in_the_extra_bench_alone_and_pinned(project: dict[str, Any]) -> None:
    extras = project["optional-dependencies"]
    assert [Requirement(text).name for text in extras["bench"]] == ["matplotlib"]
    assert all("==" in text for text in extras["bench"])
    assert not any("matplotlib" in text for text in (*project["dependencies"], *extras["dev"], *locked()))


def test_every_process_names_the_projects_version(project: dict[str, Any]) -> None:
    code = [file for room in ("router", "prefill_worker", "decode_worker", "common") for file in (ROOT / room).rglob("*.py")]
    named = {
        str(file.relative_to(ROOT)): found[1]
        for file in code
        if (found := re.search(r'^VERSION\b.*= "(.+)"$', file.read_text(), re.MULTILINE))
    }
    assert named
    assert set(named.values()) == {project["version"]}, named


def test_make_has_the_targets_that_people_rely_on_and_help_lists_them() -> None:
    done = subprocess.run(
        ["make", "-s", "help", f"PYTHON={sys.executable}"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert [line.split()[0] for line in done.stdout.splitlines()] == TARGETS


def test_make_with_python_runs_that_interpreter_and_installs_nothing() -> None:
    for target in set(TARGETS) - {"clean", "help", "setup"}:
        done = subprocess.run(["make", "-n", target, "PYTHON=/the/one"], cwd=ROOT, capture_output=True, text=True, check=True)
        assert "/the/one -m" in done.stdout or "/the/one protos/generate.py" in done.stdout, target
        assert ".venv" not in done.stdout, target
        assert "pip install" not in done.stdout, target


def test_a_model_s_folder_may_have_any_name() -> None:
    name = "/models/it's $HOME, `one`"
    line = ["make", "-n", "run-local", "PYTHON=/the/one", f"MODEL={name.replace('$', '$$')}"]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=True)
    words = shlex.split(done.stdout)
    assert words[words.index("--model") + 1] == name


def test_every_python_target_names_a_module_that_exists() -> None:
    modules = re.findall(r"\$\(PYTHON\) -m ((?:deploy|examples|bench|tests)[\w.]*)", (ROOT / "Makefile").read_text())
    missing = [
        name
        for name in modules
        if not (ROOT / (name.replace(".", "/") + ".py")).exists() and not (ROOT / name.replace(".", "/") / "__main__.py").exists()
    ]
    assert missing == []
