"""What CI runs, step by step, with a summary: python -m tests [group ...]

Every step runs, also after one failed, so that one run shows everything that is wrong.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PYTHON = sys.executable
GROUPS = ("lint", "types", "protos", "tests")


class Step(NamedTuple):
    name: str
    group: str
    command: list[str]


def steps() -> list[Step]:
    # buf comes as a program next to the interpreter.
    buf = shutil.which("buf", path=f"{Path(PYTHON).parent}{os.pathsep}{os.environ.get('PATH', '')}") or "buf"
    suites = [f"tests/{tier}" for tier in ("unit", "contract", "cluster", "faults")]
    return [
        Step("ruff check", "lint", [PYTHON, "-m", "ruff", "check"]),
        Step("ruff format", "lint", [PYTHON, "-m", "ruff", "format", "--check"]),
        Step("buf lint", "lint", [buf, "lint", "protos"]),
        Step("mypy --strict", "types", [PYTHON, "-m", "mypy"]),
        Step("generated code", "protos", [PYTHON, "protos/generate.py", "--check"]),
        Step("pytest", "tests", [PYTHON, "-m", "pytest", "-q", "--durations=10", *suites]),
    ]


def run(step: Step) -> tuple[bool, float]:
    """Whether it passed, and the seconds it took."""
    print(f"\n== {step.name}", flush=True)
    began = time.monotonic()
    try:
        passed = subprocess.run(step.command, cwd=ROOT, check=False).returncode == 0
    except FileNotFoundError as error:
        print(f"error: {error.filename} is not installed")
        passed = False
    return passed, time.monotonic() - began


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("groups", nargs="*", metavar="group", help=f"of {', '.join(GROUPS)}; default: all")
    groups = parser.parse_args().groups or GROUPS
    if unknown := set(groups) - set(GROUPS):
        parser.error(f"no such group: {', '.join(sorted(unknown))}")
    results = {step.name: run(step) for step in steps() if step.group in groups}
    print("\n== summary")
    for name, (passed, seconds) in results.items():
        print(f"{'PASS' if passed else 'FAIL'}  {name:<16}{seconds:6.1f} s")
    return 0 if all(passed for passed, _ in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
