"""One process of the local cluster: started, its output shown with a prefix, asked to stop once."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress

LONGEST_LINE = 1 << 20


class Child:
    """A running process in a session of its own: a Ctrl-C in the terminal does not reach it, only interrupt() does."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, show: Callable[[str], None]) -> None:
        self.name = name
        self.last_line = ""
        self._process = process
        self._show = show
        self.ended = asyncio.create_task(self._follow(), name=name)
        """Done with the exit code, once all output is shown."""

    @classmethod
    async def start(cls, name: str, command: Sequence[str], *, env: dict[str, str], show: Callable[[str], None]) -> Child:
        # Inherited: also before deploy.tied holds it back itself, a Ctrl-C waits until the process hears it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "deploy.tied", str(os.getpid()), *command),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env=os.environ | env | {"PYTHONUNBUFFERED": "1"},
                start_new_session=True,
                limit=LONGEST_LINE,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return cls(name, process, show)

    def interrupt(self) -> None:
        """Sends SIGINT, if it still runs."""
        self._signal(signal.SIGINT)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if self._process.returncode is None:
            # Not the process's own send_signal: it reaps a process that has ended, whose exit code asyncio then does not learn.
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, number)

    async def _follow(self) -> int:
        assert self._process.stdout is not None
        while True:
            try:
                line = await self._process.stdout.readline()
            except ValueError:
                line = b"(a line that is too long to show)\n"
            if not line:
                break
            text = line.decode(errors="replace").rstrip()
            self.last_line = text or self.last_line
            self._show(text)
        code = await self._process.wait()
        return code if code >= 0 else 128 - code
