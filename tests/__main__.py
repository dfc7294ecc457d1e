"""What CI runs, with a summary: python -m tests [group ...]

Two lanes side by side, since most cluster tests leave one of two cores idle: real processes in one, whose output is shown as it
comes; everything quick in the other, shown when both have ended. Every step runs, also after one failed, so that one run shows
everything that is wrong.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PYTHON = sys.executable
GROUPS = ("lint", "types", "protos", "tests")


class Step(NamedTuple):
    name: str
    group: str
    command: list[str]
    is_slow: bool = False


class Result(NamedTuple):
    step: Step
    passed: bool
    seconds: float
    output: str


def steps() -> list[Step]:
    # buf comes as a program next to the interpreter.
    buf = shutil.which("buf", path=f"{Path(PYTHON).parent}{os.pathsep}{os.environ.get('PATH', '')}") or "buf"
    pytest = [PYTHON, "-m", "pytest", "-q", "--durations=5"]
    return [
        Step("ruff check", "lint", [PYTHON, "-m", "ruff", "check"]),
        Step("ruff format", "lint", [PYTHON, "-m", "ruff", "format", "--check"]),
        Step("buf lint", "lint", [buf, "lint", "protos"]),
        Step("mypy --strict", "types", [PYTHON, "-m", "mypy"]),
        Step("generated code", "protos", [PYTHON, "protos/generate.py", "--check"]),
        Step("unit, contract", "tests", [*pytest, "tests/unit", "tests/contract"]),
        Step("cluster, faults", "tests", [*pytest, "tests/cluster", "tests/faults"], is_slow=True),
    ]


def run(step: Step) -> Result:
    began = time.monotonic()
    kept = None if step.is_slow else subprocess.PIPE
    try:
        done = subprocess.run(step.command, cwd=ROOT, stdout=kept, stderr=kept and subprocess.STDOUT, text=True, check=False)
        passed, output = done.returncode == 0, done.stdout or ""
    except FileNotFoundError as error:
        passed, output = False, f"error: {error.filename} is not installed\n"
    return Result(step, passed, time.monotonic() - began, output)


def run_all(chosen: Sequence[Step]) -> list[Result]:
    lanes = [[step for step in chosen if step.is_slow is is_slow] for is_slow in (False, True)]
    with ThreadPoolExecutor(len(lanes)) as pool:
        return [result for results in pool.map(lambda lane: [run(step) for step in lane], lanes) for result in results]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("groups", nargs="*", metavar="group", help=f"of {', '.join(GROUPS)}; default: all")
    groups = parser.parse_args().groups or GROUPS
    if unknown := set(groups) - set(GROUPS):
        parser.error(f"no such group: {', '.join(sorted(unknown))}")
    results = run_all([step for step in steps() if step.group in groups])
    for result in results:
        if result.output:
            print(f"\n== {result.step.name}\n{result.output}", end="")
    print("\n== summary")
    for result in results:
        print(f"{'PASS' if result.passed else 'FAIL'}  {result.step.name:<16}{result.seconds:6.1f} s")
    return 0 if all(result.passed for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
