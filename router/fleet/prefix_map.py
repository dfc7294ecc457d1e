"""PrefixMap: which leading blocks this router has sent to which worker, so probably are in its prefix cache.

A guess: a worker evicts without telling, other routers send to it too. A wrong one costs computing that was hoped to be saved.
Each worker's blocks are kept least recently used first, as many as its pool could hold.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


class PrefixMap:
    """By worker id; ids are unique per process start, so nothing is thought of a worker's former self."""

    def __init__(self) -> None:
        self._blocks: dict[str, OrderedDict[bytes, None]] = {}

    def __len__(self) -> int:
        """Blocks known, over all workers."""
        return sum(map(len, self._blocks.values()))

    def matched(self, worker_id: str, blocks: Sequence[bytes]) -> int:
        """How many leading blocks the worker probably has. No block is kept without those before it (note), so by halving."""
        known = self._blocks.get(worker_id)
        if not known:
            return 0
        low, high = 0, len(blocks)
        while low < high:
            middle = (low + high) // 2
            if blocks[middle] in known:
                low = middle + 1
            else:
                high = middle
        return low

    def note(self, worker_id: str, blocks: Sequence[bytes], *, capacity: int) -> None:
        """The worker is given a prompt of these blocks. capacity: how many blocks its pool holds."""
        known = self._blocks.setdefault(worker_id, OrderedDict())
        for block in reversed(blocks[:capacity]):  # The first block last: it is forgotten after those that follow it.
            known[block] = None
            known.move_to_end(block)
        while len(known) > capacity:
            known.popitem(last=False)

    def forget(self, worker_id: str) -> None:
        """The worker is gone. Idempotent."""
        self._blocks.pop(worker_id, None)

    def clear(self) -> None:
        """The workers have dropped their caches."""
        self._blocks.clear()
