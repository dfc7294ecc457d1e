"""The processes of a local cluster, as one thing that becomes ready, stops, and has an exit code."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Callable, Sequence

from common.log_output import LineOutput
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
        self._stdout = LineOutput(1)
        """Not print(): whoever stops reading, closes the terminal or fills the disk stops neither the cluster nor its end."""
        self._stopping = asyncio.Event()
        self._ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def stop(self) -> None:
        """The first call asks every process to end; a second one kills them."""
        if self._stopping.is_set():
            self._kill()
        else:
            say("stopping (once more: kill)")
            self._stopping.set()

    async def run(self) -> int:
        """Until all processes have ended: 0 if they were asked to and did well, else the first bad one's exit code."""
        await self._start()
        announcing = asyncio.create_task(self._announce())
        stopping = asyncio.create_task(self._stopping.wait())
        await asyncio.wait([*(child.ended for child in self._children), stopping], return_when=asyncio.FIRST_COMPLETED)
        code = 0 if self._stopping.is_set() else self._blame()
        for task in (announcing, stopping):
            task.cancel()
        await self._end()
        return code or next((child.ended.result() for child in self._children if child.ended.result()), 0)

    async def _start(self) -> None:
        width = max(len(command.name) for command in self._commands)
        for command, colour in zip(self._commands, itertools.cycle(COLOURS), strict=False):
            if not self._stopping.is_set():
                show = self._shower(command.name, width, colour)
                self._children.append(await Child.start(command.name, command.line, env=command.env, show=show))

    def _blame(self) -> int:
        """Says which process ended although nobody asked it to; the exit code that follows from it."""
        first = next(child for child in self._children if child.ended.done())
        code = first.ended.result()
        say(f"error: {first.name} ended with exit code {code}: {first.last_line}")
        return code or 1

    async def _end(self) -> None:
        """The router first, which needs the workers to finish what is running; then the workers. Each gets one SIGINT."""
        try:
            async with asyncio.timeout(STOP_SECONDS):
                for group in (self._children[:1], self._children[1:]):
                    for child in group:
                        child.interrupt()
                    for child in group:
                        await asyncio.shield(child.ended)
        except TimeoutError:
            late = [child.name for child in self._children if not child.ended.done()]
            say(f"{', '.join(late)} did not end within {STOP_SECONDS} s: killed")
            self._kill()
            await asyncio.gather(*(child.ended for child in self._children))

    def _kill(self) -> None:
        for child in self._children:
            child.kill()

    def _shower(self, name: str, width: int, colour: int) -> Callable[[str], None]:
        prefix = f"{name:<{width}} | "
        if os.isatty(1):
            prefix = f"\033[{colour}m{prefix}\033[0m"

        def show(text: str) -> None:
            lost = f"({self._stdout.lost} lines were lost: nobody took them)\n" if self._stdout.lost else ""
            self._stdout.write(f"{lost}{prefix}{text}")
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
