"""Imports run one way, and the router stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROCESSES = ("router", "prefill_worker", "decode_worker")
# What code in a room may import of this repository, besides the room itself.
ALLOWED = {
    "common": set[str](),
    "router": {"common"},
    "prefill_worker": {"common"},
    "decode_worker": {"common"},
    "deploy": {"common", *PROCESSES},
    "examples": {"common"},
}
ROOMS = {*ALLOWED, "tests", "bench"}
# The same within the router: what a folder of it may import of the others. Its own files, where all of it meets, may import any.
ROUTER = {"request": set[str](), "text": {"request"}, "fleet": set[str](), "queueing": {"fleet"}}
HEAVY = ("torch", "transformers", "numpy", "safetensors", "huggingface_hub", "opentelemetry")


def imported(source: str, depth: int = 1) -> set[str]:
    """Packages that a module imports, wherever in it: the first `depth` names of each."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {".".join(name.name.split(".")[:depth]) for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the direction"
            names = [f"{node.module}.{name.name}" for name in node.names]
            found |= {".".join(name.split(".")[:depth]) for name in names}
    return found


@pytest.mark.parametrize("room", ALLOWED)
def test_imports_run_one_way(room: str) -> None:
    files = sorted((ROOT / room).rglob("*.py"))
    assert files
    wrong = {
        f"{file.relative_to(ROOT)} imports {other}"
        for file in files
        if "gen" not in file.parts
        for other in imported(file.read_text()) & ROOMS - ALLOWED[room] - {room}
    }
    assert wrong == set()


@pytest.mark.parametrize("folder", ROUTER)
def test_the_routers_folders_import_one_way(folder: str) -> None:
    files = sorted((ROOT / "router" / folder).rglob("*.py"))
    assert files
    allowed = {f"router.{name}" for name in (folder, *ROUTER[folder])}
    wrong = {
        f"{file.relative_to(ROOT)} imports {other}"
        for file in files
        for other in imported(file.read_text(), depth=2)
        if other.startswith("router.") and other not in allowed
    }
    assert wrong == set()


@pytest.mark.parametrize("source", ["import router.x", "from router.x import y", "def f():\n    from router import x"])
def test_a_wrong_import_would_be_found(source: str) -> None:
    assert imported(source) == {"router"} and imported(source, depth=2) == {"router.x"}


def test_the_router_imports_nothing_heavy() -> None:
    """In a process of its own: what a running router has loaded, not what its files say."""
    code = f"import sys, router.server, router.config; print(*(name for name in {HEAVY!r} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
