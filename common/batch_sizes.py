"""BatchSizes: the batch sizes that a decode worker captures a CUDA graph for."""

from __future__ import annotations

from collections.abc import Iterable


class BatchSizes(tuple[int, ...]):
    """Rising, each at least 1. Empty: no graphs. Prints as it is written: 1,2,4 or none."""

    __slots__ = ()

    def __new__(cls, sizes: Iterable[int] = ()) -> BatchSizes:
        rising = sorted(set(sizes))
        if rising and rising[0] < 1:
            raise ValueError(f"must be at least 1 each, got {rising[0]}")
        return super().__new__(cls, rising)

    @classmethod
    def parse(cls, text: str) -> BatchSizes:
        """Raises ValueError unless text is numbers with commas between, nothing, or none."""
        if text.strip() in ("", "none"):
            return cls()
        parts = [part.strip() for part in text.split(",")]
        if not all(part.isascii() and part.isdigit() for part in parts):
            raise ValueError(f"must be batch sizes like 1,2,4, or none, got {text!r}")
        return cls(map(int, parts))

    @classmethod
    def up_to(cls, largest: int) -> BatchSizes:
        """Close enough to each other that padding costs little: a step's time hardly moves within eight rows."""
        steps = (1, 2, 4, *range(8, 257, 8), *range(288, largest, 32))
        return cls([*(size for size in steps if size < largest), largest])

    def __str__(self) -> str:
        return ",".join(map(str, self)) or "none"
