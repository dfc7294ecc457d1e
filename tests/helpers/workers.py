"""Workers as a router sees them, by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from common.work import Compatibility, PageCounts, Role, WorkerLoad, WorkerProfile
from router.fleet.workers import Worker

SAME = Compatibility("f", "float32", 16, 1024, 2, 2, 16)


def profile(worker_id: str, role: Role = "prefill", *, port: int = 1, **differs: Any) -> WorkerProfile:
    return WorkerProfile(worker_id, role, f"127.0.0.1:{port}", replace(SAME, **differs), "cpu", 10, 1, "0")


def worker(
    worker_id: str,
    role: Role,
    *,
    pages: int = 100,
    session: bool = True,
    max_running: int = 8,
    free: int | None = None,
    alone: bool = False,
    **load: Any,
) -> Worker:
    """Registered and at rest, unless told otherwise."""
    address = f"127.0.0.1:{hash(worker_id) % 60000}"
    made = Worker(WorkerProfile(worker_id, role, address, SAME, "cpu", pages, max_running, "0", local_prefill=alone))
    free = pages if free is None else free
    made.report(WorkerLoad(**load, pages=PageCounts(free, pages - free, 0, 0, pages)))
    made.has_session = session
    return made
