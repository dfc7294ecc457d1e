"""The tests' own warm workers: what the process that forks them tells is about the right one."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.warm import Warm

pytestmark = pytest.mark.unit


class Told:
    """What the forking process says, in order; nothing more after it."""

    def __init__(self, *lines: dict[str, Any]) -> None:
        self._lines = list(lines)

    @property
    def is_ready(self) -> bool:
        return bool(self._lines)

    def read(self) -> dict[str, Any]:
        return self._lines.pop(0)

    def write(self, value: dict[str, Any]) -> None:
        pass


def test_a_process_with_the_number_of_one_that_has_ended_has_not() -> None:
    warm: Any = Warm.__new__(Warm)
    warm._lock, warm._codes = threading.Lock(), {}
    warm._lines = Told({"pid": 7}, {"pid": 7, "code": -9}, {"pid": 7})
    assert warm.fork("m", [], log=Path("log"), env={}) == 7
    assert warm.fork("m", [], log=Path("log"), env={}) == 7
    assert warm.code(7) is None
    warm._lines = Told({"pid": 7, "code": 0})
    assert warm.code(7) == 0
