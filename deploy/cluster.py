"""The processes of a local cluster, as one thing that becomes ready, stops, and has an exit code."""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from collections.abc import Callable, Sequence

from deploy.child import Child
from deploy.cluster_plan import Command
from deploy.progress import say

READY = "router ready on "
STOP_SECONDS = 40
"""Longer than the processes' own grace."""
COLOURS = (36, 32, 35, 33, 34, 31)
EXAMPLE = (
    """grpcurl -plaintext -d '{{"chat":{{"messages":[{{"role":"user","content":"What is the capital of France?"}}]}},"""
    """"sampling":{{"max_tokens":32}}}}' {address} pdserve.v1.GenerationService/Generate"""
)


class Cluster:
    """Lives in one event loop, once."""

    def __init__(self, commands: Sequence[Command]) -> None:
        self._commands = commands
        self._children: list[Child] = []
        self._stopping = asyncio.Event()
        self._ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def stop(self) -> None:
        """The first call asks every process to end, once; a second one kills them."""
        for child in self._children:
            child.kill() if self._stopping.is_set() else child.interrupt()
        if not self._stopping.is_set():
            say("stopping (once more: kill)")
        self._stopping.set()

    async def run(self) -> int:
        """Until all processes have ended: 0 if they were asked to and did well, else the first bad one's exit code."""
        width = max(len(command.name) for command in self._commands)
        for command, colour in zip(self._commands, itertools.cycle(COLOURS), strict=False):
            show = self._shower(command.name, width, colour)
            self._children.append(await Child.start(command.name, command.line, env=command.env, show=show))
        announcing = asyncio.create_task(self._announce())
        ends = {child.ended: child for child in self._children}
        stopping = asyncio.create_task(self._stopping.wait())
        await asyncio.wait([*ends, stopping], return_when=asyncio.FIRST_COMPLETED)
        announcing.cancel()
        code = 0
        if not self._stopping.is_set():
            first = next(child for child in self._children if child.ended.done())
            code = first.ended.result() or 1
            say(f"error: {first.name} ended with exit code {first.ended.result()}: {first.last_line}")
            self.stop()
        await self._all_ended()
        await asyncio.gather(announcing, stopping, return_exceptions=True)
        return code or next((end.result() for end in ends if end.result()), 0)

    async def _all_ended(self) -> None:
        ends = [child.ended for child in self._children]
        _, late = await asyncio.wait(ends, timeout=STOP_SECONDS)
        if late:
            say(f"{', '.join(task.get_name() for task in late)} did not end within {STOP_SECONDS} s: killed")
            for child in self._children:
                child.kill()
            await asyncio.wait(ends)

    def _shower(self, name: str, width: int, colour: int) -> Callable[[str], None]:
        prefix = f"{name:<{width}} | "
        if sys.stdout.isatty():
            prefix = f"\033[{colour}m{prefix}\033[0m"

        def show(text: str) -> None:
            print(prefix + text, flush=True)
            if name == "router" and text.startswith(READY) and not self._ready.done():
                self._ready.set_result(text.removeprefix(READY))

        return show

    async def _announce(self) -> None:
        """Says how long the start is taking, then that the router is ready and how to talk to it."""
        began = time.monotonic()
        while not (await asyncio.wait([self._ready], timeout=5))[0]:
            say(f"... waiting until the router has a pair of workers: {time.monotonic() - began:.0f} s")
        say(f"{READY}{self._ready.result()}")
        say(f"try: {EXAMPLE.format(address=self._ready.result())}")
