"""FreeSlots: the slots (common/handoff/staging.py) that no stream is filling, and who waits for one."""

from __future__ import annotations

import asyncio
from collections import deque


class FreeSlots:
    """First come, first served. Event loop only."""

    def __init__(self, count: int) -> None:
        self._free = deque(range(count))
        self._waiting: deque[asyncio.Future[int]] = deque()

    def __len__(self) -> int:
        return len(self._free)

    def try_take(self) -> int | None:
        return self._free.popleft() if self._free else None

    def ask(self) -> asyncio.Future[int]:
        """Done with a slot, when it is one's turn. Withdraw it if it is not waited for to the end."""
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        if self._free:
            future.set_result(self._free.popleft())
        else:
            self._waiting.append(future)
        return future

    def withdraw(self, asked: asyncio.Future[int]) -> None:
        """Gives back what it has got, or will not get."""
        if asked.done():
            self.give_back(asked.result())
        else:
            self._waiting.remove(asked)

    def give_back(self, slot: int) -> None:
        if self._waiting:
            self._waiting.popleft().set_result(slot)
        else:
            self._free.append(slot)
