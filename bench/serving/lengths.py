"""Lengths: how many tokens a request brings or asks for.

2048                    always so many
100-1024                uniform, both ends included
lognormal:512,0.8       median and sigma; a third number caps it: lognormal:512,0.8,4096
"""

from __future__ import annotations

import math
import random
import re
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Lengths:
    """Prints as it is written."""

    kind: Literal["fixed", "uniform", "lognormal"]
    low: int
    high: int | None
    sigma: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """Raises ValueError on what is none of the three."""
        made: Lengths | None = None
        if match := re.fullmatch(r"(\d+)", text, re.ASCII):
            made = cls("fixed", int(match[1]), int(match[1]))
        elif match := re.fullmatch(r"(\d+)-(\d+)", text, re.ASCII):
            made = cls("uniform", int(match[1]), int(match[2]))
        elif match := re.fullmatch(r"lognormal:(\d+),(\d+(?:\.\d+)?)(?:,(\d+))?", text, re.ASCII):
            made = cls("lognormal", int(match[1]), int(match[3]) if match[3] else None, float(match[2]))
        if made is None or made.low < 1 or (made.high is not None and made.high < made.low):
            raise ValueError(f"lengths must be like 2048, 100-1024 or lognormal:MEDIAN,SIGMA[,MOST], got {text!r}")
        return made

    def draw(self, rng: random.Random) -> int:
        if self.kind == "fixed":
            return self.low
        if self.kind == "uniform":
            assert self.high is not None
            return rng.randint(self.low, self.high)
        drawn = max(1, round(rng.lognormvariate(math.log(self.low), self.sigma)))
        return drawn if self.high is None else min(drawn, self.high)

    def __str__(self) -> str:
        if self.kind == "lognormal":
            return f"lognormal:{self.low},{self.sigma:g}" + ("" if self.high is None else f",{self.high}")
        return f"{self.low}" if self.kind == "fixed" else f"{self.low}-{self.high}"
