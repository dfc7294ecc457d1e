"""Several client processes as one source of load."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.serving.client import READY_SECONDS, Job
from bench.serving.figures import percentile
from bench.serving.records import Record
from bench.serving.shots import dealt

ROOT = Path(__file__).resolve().parents[2]
LEAD_SECONDS = 0.2
"""From the word to start to the start."""
LATE_SECONDS = 0.005
"""A client whose loop runs later than this, one time in a hundred, is part of the figures."""
BUSY_SHARE = 0.85


@dataclass(frozen=True)
class Health:
    """How the clients did, the worst of them: seconds of the 99th percentile, and the part of one core."""

    clients: int
    lateness: float
    lag: float
    cpu_share: float

    @property
    def limit(self) -> str:
        """Why the client may be what was measured; empty if it kept up."""
        reasons = []
        if self.lateness > LATE_SECONDS:
            reasons.append(f"requests left {self.lateness * 1e3:.1f} ms late (p99)")
        if self.lag > LATE_SECONDS:
            reasons.append(f"its event loop lagged {self.lag * 1e3:.1f} ms (p99)")
        if self.cpu_share > BUSY_SHARE:
            reasons.append(f"it took {self.cpu_share:.0%} of a core")
        return f"the client is the limit ({', '.join(reasons)}): more --clients, or more cores" if reasons else ""

    @classmethod
    def of(cls, reports: Sequence[dict[str, Any]]) -> Health:
        return cls(
            clients=len(reports),
            lateness=max(percentile(report["lateness"] or [0.0], 99) for report in reports),
            lag=max(percentile(report["lags"] or [0.0], 99) for report in reports),
            cpu_share=max(report["cpu_share"] for report in reports),
        )


@dataclass(frozen=True)
class Outcome:
    """model: what the router serves: name, dtype, max_context."""

    records: list[Record]
    health: Health
    model: dict[str, Any]


def default_clients() -> int:
    """The machine's cores are the workers' first."""
    return max(1, min(8, len(os.sched_getaffinity(0)) // 4))


def shoot(job: Job, *, clients: int) -> Outcome:
    """The whole load, by so many processes. Raises RuntimeError if one of them fails."""
    hands = [hand for hand in dealt(job.shots, clients) if hand]
    jobs = [replace(job, shots=hand, seed=job.seed + 7919 * number) for number, hand in enumerate(hands)]
    longest = max((shot.at for shot in job.shots), default=0.0) + job.timeout
    with _processes(len(jobs), limit=READY_SECONDS + longest + 60) as processes:
        for process, each in zip(processes, jobs, strict=True):
            _tell(process, each.to_json())
        ready = [_hear(process)["ready"] for process in processes]
        start = time.monotonic() + LEAD_SECONDS
        for process in processes:
            _tell(process, str(start))
        reports = [_hear(process) for process in processes]
    records = [Record(**record) for report in reports for record in report["records"]]
    return Outcome(
        records=sorted(records, key=lambda record: record.at),
        health=Health.of([report["health"] for report in reports]),
        model=ready[0],
    )


@contextmanager
def _processes(count: int, *, limit: float) -> Iterator[list[subprocess.Popen[str]]]:
    """limit: seconds after which they are killed, so that nobody waits for one that hangs."""
    command = [sys.executable, "-m", "deploy.tied", str(os.getpid()), sys.executable, "-m", "bench.serving.client"]
    processes = [
        subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(count)
    ]

    def kill() -> None:
        for process in processes:
            process.kill()

    timer = threading.Timer(limit, kill)
    timer.daemon = True
    timer.start()
    try:
        yield processes
    finally:
        timer.cancel()
        kill()
        for process in processes:
            process.communicate()


def _tell(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


def _hear(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    if not (line := process.stdout.readline()):
        raise RuntimeError(f"a client process ended with exit code {process.wait()} (its own words are above)")
    answer: dict[str, Any] = json.loads(line)
    return answer
