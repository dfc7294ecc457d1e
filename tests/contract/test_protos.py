"""The protos are documentation, and the generated code is theirs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def generate(*arguments: str, root: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "protos/generate.py", *arguments], cwd=root, capture_output=True, text=True, check=False
    )


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The protos and the generated code, to be changed at will."""
    for part in ("protos", "common/rpc/gen"):
        shutil.copytree(ROOT / part, tmp_path / part, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def test_the_generated_code_is_fresh() -> None:
    done = generate("--check")
    assert done.returncode == 0, done.stderr


def test_a_changed_proto_makes_the_generated_code_stale_and_generating_makes_it_fresh(copy: Path) -> None:
    proto = copy / "protos" / "pdserve" / "v1" / "work.proto"
    proto.write_text(proto.read_text() + "\n// New.\nmessage Added {}\n")
    done = generate("--check", root=copy)
    assert done.returncode == 1
    assert "generated code is stale, run `make protos`: pdserve/v1/work_pb2.py" in done.stderr
    assert generate(root=copy).returncode == 0
    assert generate("--check", root=copy).returncode == 0


def test_a_leftover_of_a_removed_proto_is_stale(copy: Path) -> None:
    (copy / "common" / "rpc" / "gen" / "pdserve" / "v1" / "gone_pb2.py").write_text("")
    assert "gone_pb2.py" in generate("--check", root=copy).stderr


def buf() -> str:
    found = shutil.which("buf", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    return found or pytest.skip("buf is not installed")


def test_buf_finds_nothing_wrong() -> None:
    done = subprocess.run([buf(), "lint", "protos"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_buf_would_find_a_field_without_a_comment(copy: Path) -> None:
    proto = copy / "protos" / "pdserve" / "v1" / "work.proto"
    proto.write_text(proto.read_text() + "\n// New.\nmessage Added {\n  string bare = 1;\n}\n")
    done = subprocess.run([buf(), "lint", "protos"], cwd=copy, capture_output=True, text=True, check=False)
    assert "bare" in done.stdout
