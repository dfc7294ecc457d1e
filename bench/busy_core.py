"""BusyCore: an engine core that makes steps of pure Python, for bench/engine_handle.py; apart, for a child process imports it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from common.engine.handle import Emit
from common.work import TokenOut
from common.work_key import WorkKey
from decode_worker.events import StepTokens


@dataclass(frozen=True)
class Run:
    """Make steps for so long."""

    seconds: float


@dataclass(frozen=True)
class Step:
    """One step's news. emitted_at: time.monotonic(), one clock for all processes; took: of the step's own work, in seconds."""

    emitted_at: float
    took: float
    tokens: StepTokens


class BusyCore:
    """Spins in Python for a fixed number of rounds per step."""

    description = None

    def __init__(self, rounds: int, tokens: int, emit: Emit) -> None:
        self._rounds = rounds
        self._tokens = StepTokens(1, tuple(TokenOut(WorkKey(1, uid, 1), 5, 7) for uid in range(tokens)))
        self._emit = emit
        self._until = 0.0

    def handle(self, command: Any, call_id: int | None) -> Any:
        if isinstance(command, Run):
            self._until = time.monotonic() + command.seconds
        return command

    def abandon(self, call_id: int) -> None:
        """No call is deferred."""

    def has_work(self) -> bool:
        return time.monotonic() < self._until

    def step(self) -> None:
        begun = time.monotonic()
        spin(self._rounds)
        now = time.monotonic()
        self._emit(Step(now, now - begun, self._tokens))

    def tick(self, now: float) -> None:
        """Nothing to clean up."""

    def close(self) -> None:
        """Nothing to give back."""


def spin(rounds: int) -> int:
    total = 0
    for i in range(rounds):
        total += i & 3
    return total
