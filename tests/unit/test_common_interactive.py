"""Programs for people, and the streams they are given."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import sys
from common import interactive
def main():
    print("caf\\u00e9"), sys.stdin.read()
    if len(sys.argv) > 1:
        raise ValueError(sys.argv[1])
    return 0
sys.exit(interactive.run(main))
"""


@pytest.mark.parametrize(
    ("streams", "code", "said"),
    [
        ("</dev/null", 0, "caf?\n"),
        ("<&- >&-", 0, ""),
        ("</dev/null >/dev/full", 2, "error: cannot write: no space left on device\n"),
        ("</dev/null >/dev/full 2>/dev/full", 2, ""),
    ],
)
def test_whatever_its_streams_are_a_program_ends_with_a_line_at_most(streams: str, code: int, said: str) -> None:
    line = ["sh", "-c", f'exec "$@" {streams}', "sh", sys.executable, "-c", PROGRAM]
    env = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(line, cwd=ROOT, env=env, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout + done.stderr) == (code, said)


def test_what_it_cannot_do_is_one_line() -> None:
    line = [sys.executable, "-c", PROGRAM, "--interval must be less"]
    done = subprocess.run(line, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stderr) == (2, "error: --interval must be less\n")
