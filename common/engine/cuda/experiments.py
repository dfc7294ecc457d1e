"""What has been written and not yet been measured on a card: off, unless PDSERVE_EXPERIMENTS names it ("fold,wide", "xqa=2").

fold   the weights of RMSNorms before a product are multiplied into the product's when the model is loaded
wide   with fold: small_linear computes products after a norm for 3 to 16 tokens, too
mid    small_linear computes small products for 17 to MID_TOKENS tokens, too; those after a norm need fold
late   with fold: up to LATE_TOKENS tokens a gated product takes its input un-normed, and SiLU's kernel divides by the root
xqa=n  attention of decode is split along the sequence until there are n programs to an SM

docs/performance.md says what each is expected to bring; with the figures, each becomes the way or goes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

LATE_TOKENS = 256


@dataclass(frozen=True)
class Experiments:
    fold: bool = False
    wide: bool = False
    mid: bool = False
    late: bool = False
    xqa: float = 1.0

    def __post_init__(self) -> None:
        if (self.wide or self.late) and not self.fold:
            raise ValueError("PDSERVE_EXPERIMENTS: wide and late need fold")


def parse(text: str) -> Experiments:
    """Raises ValueError on what is none."""
    found: dict[str, bool | float] = {}
    for word in filter(None, text.split(",")):
        name, _, value = word.partition("=")
        if name not in Experiments.__dataclass_fields__ or (name == "xqa") != bool(value):
            raise ValueError(f"PDSERVE_EXPERIMENTS must name fold, wide, mid, late or xqa=n, got {word!r}")
        found[name] = float(value) if value else True
    return Experiments(**found)  # type: ignore[arg-type]


def of_environment(environment: Mapping[str, str] = os.environ) -> Experiments:
    return parse(environment.get("PDSERVE_EXPERIMENTS", ""))
