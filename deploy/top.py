"""A cluster in the terminal, live: python -m deploy.top --router 127.0.0.1:50051 (make top). Ctrl-C leaves.

--once prints one table and ends: 0, or 2 if the router does not answer. What it shows is what GetCluster says.
"""

from __future__ import annotations

if __name__ == "__main__":
    from common import early_end

    early_end.begin()

import argparse
import asyncio
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import grpc
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from common import interactive
from common.rpc.channels import explained
from common.rpc.client_options import ClientOptions, add_client_options
from common.rpc.gen.pdserve.v1 import generation_pb2 as pb
from common.rpc.gen.pdserve.v1 import generation_pb2_grpc

CALL_SECONDS = 5.0
MIN_INTERVAL, MAX_INTERVAL = 0.1, 3600.0
PLAIN_WIDTH = 240
"""Columns of a table that goes to a file or a script."""
LOAD_COLUMNS = ("running", "waiting", "tokens", "ours")
PAGE_COLUMNS = ("free", "held", "cached", "quarantined", "of pages")
ATTEMPT_COLUMNS = ("failed", "of attempts")
STATE_STYLES = {"ready": "green", "draining": "yellow", "left": "dim"}


class Rates(NamedTuple):
    """A second, between two looks."""

    requests: float
    tokens: float

    @classmethod
    def between(cls, before: pb.Router, after: pb.Router, *, seconds: float) -> Rates:
        """Of one router; of a restarted one, from its start."""
        if after.requests < before.requests or after.output_tokens < before.output_tokens:
            before = pb.Router()
        return cls((after.requests - before.requests) / seconds, (after.output_tokens - before.output_tokens) / seconds)


def show(cluster: pb.GetClusterResponse, *, address: str, rates: Rates | None = None) -> Group:
    return Group(_head(cluster.router, address, rates), _workers(list(cluster.workers)))


def _head(router: pb.Router, address: str, rates: Rates | None) -> Text:
    state = "ready" if router.is_ready else f"not ready: {router.why_not_ready}"
    speed = "" if rates is None else f"   {rates.requests:.1f} requests/s, {rates.tokens:.0f} tokens/s"
    text = Text(f"router {address}  {router.version}, up {_span(router.uptime_ms)}, ")
    text.append(state, style="green" if router.is_ready else "red")
    text.append(
        f"\nin flight {router.in_flight} of {router.max_in_flight}, queued {router.queued} of {router.max_queue}, "
        f"in line {router.in_line} ({router.tokens_in_line} tokens), in prefill {router.completions_in_prefill}, "
        f"in decode {router.completions_in_decode}, {router.requests} requests in all{speed}\n"
    )
    return text


def _workers(workers: list[pb.Worker]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("worker", "role", "device", "state", "seen"):
        table.add_column(name, no_wrap=True)
    for name in (*LOAD_COLUMNS, *PAGE_COLUMNS, *ATTEMPT_COLUMNS):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("circuit", no_wrap=True)
    table.add_column("trouble", overflow="ellipsis", no_wrap=True)
    for worker in sorted(workers, key=lambda worker: (worker.role != "prefill", worker.id)):
        table.add_row(*_row(worker))
    if not workers:
        table.add_row("(none is registered)")
    return table


def _row(worker: pb.Worker) -> list[str | Text]:
    counts = (
        *(worker.free_pages, worker.held_pages, worker.cached_pages, worker.quarantined_pages, worker.total_pages),
        *(worker.attempts_failed, worker.attempts),
    )
    return [
        Text(worker.id),
        f"{worker.role}+prefill" if worker.local_prefill else worker.role,
        Text(worker.device),
        Text(worker.state, style=STATE_STYLES.get(worker.state, "red")),
        _span(worker.last_report_ms),
        f"{worker.running}/{worker.max_running}",
        *map(str, (worker.waiting, worker.queued_tokens, worker.in_flight, *counts)),
        Text(worker.circuit, style="" if worker.circuit == "closed" else "red"),
        Text(worker.trouble),
    ]


def _span(milliseconds: int) -> str:
    """In the largest unit that leaves a whole number, or tenths of seconds below ten."""
    seconds = milliseconds / 1000
    if seconds < 10:
        return f"{seconds:.1f}s"
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds:.0f}s"


async def watch(stub: Any, console: Console, *, address: str, interval: float) -> None:
    """Until cancelled: one table that changes or, where that is no terminal, one after the other."""
    if not console.is_terminal:
        await _look(stub, console.print, address=address, interval=interval)
    with Live(console=console, auto_refresh=False, screen=True) as live:
        await _look(stub, lambda table: live.update(table, refresh=True), address=address, interval=interval)


async def _look(stub: Any, shown: Callable[[RenderableType], None], *, address: str, interval: float) -> NoReturn:
    """A router that does not answer is shown as such, and asked again."""
    before, at = None, 0.0
    while True:
        try:
            cluster = await stub.GetCluster(pb.GetClusterRequest(), timeout=CALL_SECONDS)
        except grpc.aio.AioRpcError as error:
            shown(Text(_unanswered(address, error), style="red"))
        else:
            now = time.monotonic()
            rates = None if before is None else Rates.between(before, cluster.router, seconds=now - at)
            before, at = cluster.router, now
            shown(show(cluster, address=address, rates=rates))
        await asyncio.sleep(interval)


def _unanswered(address: str, error: grpc.aio.AioRpcError) -> str:
    return f"no answer from a router on {address}: {error.code().name}: {explained(error.details() or '')}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m deploy.top", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--router", default="127.0.0.1:50051", help="host:port (default: 127.0.0.1:50051)")
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between two looks (default: 1)")
    parser.add_argument("--once", action="store_true", help="print one table and end")
    add_client_options(parser)
    return parser


async def run(options: argparse.Namespace) -> int:
    console = Console() if sys.stdout.isatty() else Console(width=PLAIN_WIDTH)
    async with ClientOptions.of(options).connect(options.router) as channel:
        stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
        if not options.once:
            await watch(stub, console, address=options.router, interval=options.interval)
        try:
            cluster = await stub.GetCluster(pb.GetClusterRequest(), timeout=CALL_SECONDS)
        except grpc.aio.AioRpcError as error:
            print(f"error: {_unanswered(options.router, error)}", file=sys.stderr)
            return 2
        console.print(show(cluster, address=options.router))
    return 0


def main() -> int:
    parser = _parser()
    options = parser.parse_args()
    if not MIN_INTERVAL <= options.interval <= MAX_INTERVAL:
        parser.error(f"--interval must be in [{MIN_INTERVAL:g}, {MAX_INTERVAL:g}], got {options.interval:g}")
    try:
        return asyncio.run(run(options))
    except KeyboardInterrupt:
        return 0


if __name__ == "__main__":
    early_end.over()
    sys.exit(interactive.run(main))
