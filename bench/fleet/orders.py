"""Orders: what a fleet is told to do, a line of text each, and how a line is read.

kill NAME                       as by kill -9; a successor takes its place after --revive
stop NAME                       as by SIGTERM; nobody takes its place
pause NAME SECONDS              its engine stands still
slow NAME FACTOR SECONDS        its steps and transfers take FACTOR times as long
fail NAME SHARE SECONDS         SHARE of the transfers that begin there break
stat                            how the members are
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

NUMBERS: Final = {"kill": 0, "stop": 0, "pause": 1, "slow": 2, "fail": 2}
"""How many numbers follow the name."""


@dataclass(frozen=True)
class Order:
    """numbers: as above. name: empty for stat."""

    what: str
    name: str = ""
    numbers: tuple[float, ...] = ()

    @classmethod
    def parse(cls, line: str) -> Order:
        """Raises ValueError saying what a line must be."""
        words = line.split()
        if words == ["stat"]:
            return cls("stat")
        if not words or words[0] not in NUMBERS or len(words) != 2 + NUMBERS[words[0]]:
            raise ValueError(f"an order must be stat or one of {', '.join(NUMBERS)} with a name and its numbers, got {line!r}")
        try:
            numbers = tuple(float(word) for word in words[2:])
        except ValueError:
            raise ValueError(f"what follows the name must be numbers, got {line!r}") from None
        if any(number < 0 for number in numbers):
            raise ValueError(f"the numbers must be at least 0, got {line!r}")
        return cls(words[0], words[1], numbers)

    def __str__(self) -> str:
        return " ".join((self.what, self.name, *(f"{number:g}" for number in self.numbers))).strip()
