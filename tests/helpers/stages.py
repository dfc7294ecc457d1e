"""Stages: tracing that keeps what it is told."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from common.tracing import NoTracing


@dataclass
class Stages(NoTracing):
    """told: (name, error) of every stage that has ended. outputs: their output_tokens, None where a stage has none."""

    is_on: bool = True
    told: list[tuple[str, str]] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)

    def stage(self, name: str, *, parent: str, began: float, ended: float, error: str = "", **attributes: Any) -> None:
        assert ended >= began
        self.told.append((name, error))
        self.outputs.append(attributes.get("output_tokens"))
