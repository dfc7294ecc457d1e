"""One process of a fleet: its members, and the orders for them.

    python -m bench.fleet.host --members prefill-0,decode-0,... [--revive SECONDS] [--prefill-args TEXT] [--decode-args TEXT]

Reads orders from stdin (bench/fleet/orders.py), says what happened as a JSON object a line on stdout, and stops all members when
stdin ends.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import sys
from collections.abc import Awaitable
from typing import Any

import psutil
import uvloop
from grpc._cython import cygrpc  # type: ignore[attr-defined]

from bench.fleet.member import Member, Role
from bench.fleet.orders import Order
from common.logs import configure


class Host:
    """Event loop only."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._arguments: dict[str, list[str]] = {
            "prefill": shlex.split(args.prefill_args),
            "decode": shlex.split(args.decode_args),
        }
        self._revive_seconds: float = args.revive
        self._names: list[str] = args.members.split(",")
        self._seed: int = args.seed
        self._born = 0
        self._members: dict[str, Member] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        asyncio.get_running_loop().set_exception_handler(_complain)
        for name in self._names:
            await self._bear(name)
        say(event="ready", members=len(self._members), pid=os.getpid())
        lines = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
        while line := (await lines.readline()).decode():
            try:
                self._obey(Order.parse(line))
            except ValueError as error:
                say(event="refused", why=str(error))
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*(member.stop() for member in self._members.values()))

    async def _bear(self, name: str) -> None:
        role: Role = "prefill" if name.startswith("prefill") else "decode"
        self._born += 1
        member = Member(role, name, self._arguments[role], seed=self._seed + 7919 * self._born)
        await member.start()
        self._members[name] = member

    def _obey(self, order: Order) -> None:
        if order.what == "stat":
            say(event="stat", **self._stat())
        elif (member := self._members.get(order.name)) is None:
            say(event="refused", why=f"no member is called {order.name!r} here (it may be dead)")
        else:
            if order.what in ("kill", "stop"):
                del self._members[member.name]
            self._spawn(self._carry_out(order, member))

    async def _carry_out(self, order: Order, member: Member) -> None:
        say(event="order", order=str(order))
        deeds: dict[str, Any] = {
            "kill": lambda: self._kill(member),
            "stop": member.stop,
            "pause": lambda: member.pause(*order.numbers),
            "slow": lambda: member.slow(*order.numbers),
            "fail": lambda: member.fail_transfers(*order.numbers),
        }
        deed: Awaitable[None] = deeds[order.what]()
        await deed
        say(event="done", order=str(order))

    async def _kill(self, member: Member) -> None:
        await member.kill()
        await asyncio.sleep(self._revive_seconds)
        await self._bear(member.name)

    def _stat(self) -> dict[str, Any]:
        process = psutil.Process()
        return {
            "pid": process.pid,
            "members": len(self._members),
            "ended": sorted(name for name, member in self._members.items() if member.has_ended),
            "lag_seconds": max((member.lag_seconds for member in self._members.values()), default=0.0),
            "rss": process.memory_info().rss,
            "cpu_seconds": sum(process.cpu_times()[:2]),
            "descriptors": process.num_fds(),
        }

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _complain(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """What a killed member still tries on its closed channels is nobody's concern."""
    if not isinstance(context.get("exception"), cygrpc.UsageError):
        loop.default_exception_handler(context)


def say(**values: Any) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.fleet.host", allow_abbrev=False)
    parser.add_argument("--members", required=True)
    parser.add_argument("--revive", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prefill-args", default="")
    parser.add_argument("--decode-args", default="")
    parser.add_argument("--log-level", default="warning")
    args = parser.parse_args()
    configure("fleet", args.log_level)
    uvloop.run(Host(args).run())


if __name__ == "__main__":
    main()
