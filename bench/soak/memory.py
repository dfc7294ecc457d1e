"""Memory: what processes have resident over the course of a run, and whether it grows."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Mapping
from typing import Final

import psutil

EVERY_SECONDS: Final = 0.25
WINDOW: Final = 0.1
"""Of the run: what is compared is the mean of so much of it, so that one large moment is no growth."""


class Memory:
    """Samples until stopped: `async with Memory({"router": pid}) as memory`."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._processes = {name: psutil.Process(pid) for name, pid in pids.items()}
        self.samples: dict[str, list[int]] = {name: [] for name in pids}
        """Bytes."""
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Memory:
        self._task = asyncio.create_task(self._sample())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def growths(self) -> dict[str, float]:
        """By process, over the second half: the last tenth's mean against that of the tenth after the middle, as a share of it.
        Empty if the run was too short to say."""
        long_enough = all(len(samples) * WINDOW >= 1 for samples in self.samples.values())
        return {name: growth(samples) for name, samples in self.samples.items()} if long_enough else {}

    async def _sample(self) -> None:
        while True:
            for name, process in self._processes.items():
                self.samples[name].append(process.memory_info().rss)
            await asyncio.sleep(EVERY_SECONDS)


def growth(samples: list[int]) -> float:
    """See Memory.growths. Raises ValueError on too few samples to say."""
    window = int(len(samples) * WINDOW)
    if window < 1:
        raise ValueError(f"growth needs at least {int(1 / WINDOW)} samples, got {len(samples)}")
    middle = len(samples) // 2
    before = statistics.mean(samples[middle : middle + window])
    return statistics.mean(samples[-window:]) / before - 1
