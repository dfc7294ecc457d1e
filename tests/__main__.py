"""What CI runs, with a summary: python -m tests [group ...]

The tests run in LANES processes side by side, since most cluster tests leave one of two cores idle; a lane that has nothing left
takes half of what the other still has (pytest-xdist), so that both are busy to the end. Their output is shown as it comes. The
checks, seconds each, run beside them one after another and are shown at the end. Tests that measure how long something takes
(marked quiet) come last, with nothing beside them. Every step runs, also after one failed, so that one run shows everything that
is wrong.
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
LANES = 2
TESTS = ("tests/cluster", "tests/faults", "tests/unit", "tests/contract")


class Step(NamedTuple):
    name: str
    group: str
    command: list[str]
    is_shown: bool = False
    is_last: bool = False


class Result(NamedTuple):
    step: Step
    passed: bool
    seconds: float
    output: str


def steps() -> list[Step]:
    # buf comes as a program next to the interpreter.
    buf = shutil.which("buf", path=f"{Path(PYTHON).parent}{os.pathsep}{os.environ.get('PATH', '')}") or "buf"
    pytest = [PYTHON, "-m", "pytest", "-q", "--durations=10"]
    lanes = [f"--numprocesses={LANES}", "--dist=worksteal", "-m", "not quiet"]
    return [
        Step("ruff check", "lint", [PYTHON, "-m", "ruff", "check"]),
        Step("ruff format", "lint", [PYTHON, "-m", "ruff", "format", "--check"]),
        Step("buf lint", "lint", [buf, "lint", "protos"]),
        Step("mypy --strict", "types", [PYTHON, "-m", "mypy"]),
        Step("generated code", "protos", [PYTHON, "protos/generate.py", "--check"]),
        Step("tests", "tests", [*pytest, *lanes, *TESTS], is_shown=True),
        Step("quiet tests", "tests", [*pytest, "-m", "quiet", *TESTS], is_shown=True, is_last=True),
    ]


def run(step: Step) -> Result:
    began = time.monotonic()
    kept = None if step.is_shown else subprocess.PIPE
    try:
        done = subprocess.run(step.command, cwd=ROOT, stdout=kept, stderr=kept and subprocess.STDOUT, text=True, check=False)
        passed, output = done.returncode == 0, done.stdout or ""
    except FileNotFoundError as error:
        passed, output = False, f"error: {error.filename} is not installed\n"
    return Result(step, passed, time.monotonic() - began, output)


def run_all(chosen: Sequence[Step]) -> list[Result]:
    """Those that are shown as they run beside the others; the last ones alone."""
    rows = [[step for step in chosen if step.is_shown is is_shown and not step.is_last] for is_shown in (False, True)]
    with ThreadPoolExecutor(len(rows)) as pool:
        results = [result for results in pool.map(lambda row: [run(step) for step in row], rows) for result in results]
    return results + [run(step) for step in chosen if step.is_last]


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
