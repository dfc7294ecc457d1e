"""A default that depends on where a worker computes.

    dtype: str = by_device(cpu="float32", cuda="bfloat16", help="of weights", choices=(...))

The field's default is a ByDevice until resolve(config) has put the device's value in its place, which a config's __post_init__
does before anything else: whoever reads a config sees values only. --help shows both.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from common.config import option, show


@dataclass(frozen=True)
class ByDevice:
    """Prints as --help shows it."""

    cpu: Any
    cuda: Any

    def __str__(self) -> str:
        return f"{show(self.cpu)} on cpu, {show(self.cuda)} on cuda"


def by_device(*, cpu: Any, cuda: Any, help: str, choices: Sequence[Any] | None = None) -> Any:
    """A field of a config that may be left out."""
    return option(ByDevice(cpu, cuda), help, choices=choices)


def is_cuda(device: str) -> bool:
    return device.startswith("cuda")


def check_device_name(device: str) -> str:
    """cpu or cuda:N; cuda is its first device. Raises ValueError on anything else."""
    if re.fullmatch(r"cpu|cuda|cuda:(0|[1-9][0-9]{0,2})", device, re.ASCII) is None:
        raise ValueError(f"--device must be cpu, cuda or cuda:N, got {device!r}")
    return "cuda:0" if device == "cuda" else device


def resolve(config: Any, device: str) -> None:
    """Puts the device's value in place of every ByDevice of a dataclass under construction, frozen or not."""
    for field in dataclasses.fields(config):
        if isinstance(value := getattr(config, field.name), ByDevice):
            object.__setattr__(config, field.name, value.cuda if is_cuda(device) else value.cpu)
