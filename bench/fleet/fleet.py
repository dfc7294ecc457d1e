"""Fleet: simulated workers in several processes, as one thing that starts, takes orders and stops."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[2]
START_SECONDS: Final = 120.0
ANSWER_SECONDS: Final = 30.0
STOP_SECONDS: Final = 40.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a fleet is made of.

    arguments: of every worker; prefill_args, decode_args: of one side's. revive: seconds from a kill to the successor's start.
    """

    model: Path
    router: str
    prefill: int = 1
    decode: int = 1
    processes: int = 1
    time_scale: float = 1.0
    revive: float = 1.0
    seed: int = 0
    arguments: Sequence[str] = ()
    prefill_args: Sequence[str] = ()
    decode_args: Sequence[str] = ()
    log_level: str = "warning"

    @property
    def names(self) -> list[str]:
        return [f"{role}-{number}" for role in ("prefill", "decode") for number in range(getattr(self, role))]

    def command(self, names: Sequence[str], seed: int) -> list[str]:
        shared = ["--model", str(self.model), "--router", self.router, "--time-scale", f"{self.time_scale:g}", *self.arguments]
        return [
            *(sys.executable, "-m", "deploy.tied", str(os.getpid()), sys.executable, "-m", "bench.fleet.host"),
            *("--members", ",".join(names), "--revive", f"{self.revive:g}", "--seed", str(seed), "--log-level", self.log_level),
            f"--prefill-args={shlex.join([*shared, *self.prefill_args])}",
            f"--decode-args={shlex.join([*shared, *self.decode_args])}",
        ]


@dataclass
class _Host:
    """One process. names: of its members."""

    process: asyncio.subprocess.Process
    names: list[str]
    follower: asyncio.Task[None] | None = None
    ready: asyncio.Future[int] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    stat: asyncio.Future[dict[str, Any]] | None = None


class Fleet:
    """Event loop only: `async with Fleet(plan, log=path) as fleet`."""

    def __init__(self, plan: Plan, *, log: Path) -> None:
        """log: where the workers' own lines go."""
        self.plan = plan
        self.done: Counter[str] = Counter()
        """Orders that were carried out, by kind."""
        self.refused: list[str] = []
        self._log = log
        self._hosts: list[_Host] = []

    async def __aenter__(self) -> Fleet:
        try:
            hands = [self.plan.names[number :: self.plan.processes] for number in range(self.plan.processes)]
            for number, names in enumerate(hand for hand in hands if hand):
                self._hosts.append(await self._start(names, self.plan.seed + 1_000_003 * number))
            async with asyncio.timeout(START_SECONDS):
                await asyncio.gather(*(host.ready for host in self._hosts))
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def pids(self) -> list[int]:
        """Of the workers' processes."""
        return [host.ready.result() for host in self._hosts]

    async def order(self, line: str) -> None:
        """See bench/fleet/orders.py. Raises ValueError if no process has such a member."""
        name = line.split()[1]
        host = next((host for host in self._hosts if name in host.names), None)
        if host is None:
            raise ValueError(f"a member must be one of prefill-0 to decode-{self.plan.decode - 1}, got {name!r}")
        await _tell(host, line)

    async def stats(self) -> list[dict[str, Any]]:
        """How each process is (bench/fleet/host.py). Raises TimeoutError if one does not say."""
        for host in self._hosts:
            host.stat = asyncio.get_running_loop().create_future()
            await _tell(host, "stat")
        async with asyncio.timeout(ANSWER_SECONDS):
            return [await host.stat for host in self._hosts if host.stat is not None]

    async def close(self) -> None:
        """Every worker drains and leaves; whoever does not is killed."""
        for host in self._hosts:
            assert host.process.stdin is not None
            host.process.stdin.close()
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await asyncio.gather(*(host.process.wait() for host in self._hosts))
        except TimeoutError:
            for host in self._hosts:
                if host.process.returncode is None:
                    host.process.kill()
                    await host.process.wait()
        await asyncio.gather(*(host.follower for host in self._hosts if host.follower is not None))

    async def _start(self, names: list[str], seed: int) -> _Host:
        with self._log.open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *self.plan.command(names, seed),
                cwd=ROOT,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        host = _Host(process, names)
        host.follower = asyncio.create_task(self._follow(host), name=f"follow {process.pid}")
        return host

    async def _follow(self, host: _Host) -> None:
        assert host.process.stdout is not None
        while line := await host.process.stdout.readline():
            if line.startswith(b"{"):  # Workers say themselves that they are ready.
                self._take(host, json.loads(line))
        code = await host.process.wait()
        error = RuntimeError(f"a process of the fleet ended with exit code {code}: its log is {self._log}")
        for waiting in (host.ready, host.stat):
            if waiting is not None and not waiting.done():
                waiting.set_exception(error)
                waiting.exception()  # Whoever still waits is told; nobody has to.

    def _take(self, host: _Host, said: dict[str, Any]) -> None:
        match said.pop("event"):
            case "ready":
                host.ready.set_result(said["pid"])
            case "stat":
                if host.stat is not None and not host.stat.done():  # Else nobody waits for it any more.
                    host.stat.set_result(said)
            case "done":
                self.done[said["order"].split()[0]] += 1
            case "refused":
                self.refused.append(said["why"])


async def _tell(host: _Host, line: str) -> None:
    assert host.process.stdin is not None
    host.process.stdin.write(line.encode() + b"\n")
    await host.process.stdin.drain()
