"""Bench: one system's router under loads, and what came of each."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.serving.client import Job
from bench.serving.clients import Health, Outcome, shoot
from bench.serving.figures import Figures
from bench.serving.shots import Shot, Window


@dataclass(frozen=True)
class Sampling:
    temperature: float = 0.0
    top_p: float = 1.0


@dataclass(frozen=True)
class Measured:
    """One load's outcome. label: of the table's row. rate: requests per second offered, if that is what was set."""

    system: str
    label: str
    figures: Figures
    health: Health
    rate: float | None = None

    def as_dict(self) -> dict[str, Any]:
        client = {"clients": self.health.clients, "limit": self.health.limit, "cpu_share": round(self.health.cpu_share, 3)}
        return {"system": self.system, "load": self.label, "rate": self.rate, **self.figures.as_dict(), "client": client}


@dataclass(frozen=True)
class Bench:
    """drain: seconds that requests may take to end after the last arrival, before they are cut and count as failed."""

    system: str
    router: str
    seed: int
    sampling: Sampling
    clients: int
    drain: float
    timeout: float

    def shoot(self, shots: Sequence[Shot], *, cut_at: float | None = None) -> Outcome:
        """cut_at: seconds after the start; None: drain after the last arrival."""
        last = max((shot.at for shot in shots), default=0.0)
        job = Job(
            router=self.router,
            shots=list(shots),
            seed=self.seed,
            cut_at=last + self.drain if cut_at is None else cut_at,
            timeout=self.timeout,
            temperature=self.sampling.temperature,
            top_p=self.sampling.top_p,
        )
        return shoot(job, clients=self.clients)

    def measure(self, label: str, shots: Sequence[Shot], *, window: Window | None, rate: float | None = None) -> Measured:
        outcome = self.shoot(shots)
        measured = Measured(self.system, label, Figures.of(outcome.records, window), outcome.health, rate)
        say(f"{self.system}: {label}: {brief(measured.figures)}")
        return measured


def brief(figures: Figures) -> str:
    ttft, gap = figures.at("ttft", 90) * 1e3, figures.at("gap", 99) * 1e3
    failed = f", {figures.failures} failed" if figures.failures else ""
    return (
        f"{figures.requests} requests{failed}, ttft p90 {ttft:.1f} ms, gap p99 {gap:.2f} ms, {figures.output_rate:.0f} tokens/s"
    )


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
