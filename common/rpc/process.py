"""How a process of ours begins and ends.

SIGINT or SIGTERM, first    stop.requested is set; main drains and returns
                  second    the process ends at once, code 130 or 143
main returns                its value is the exit code
main calls end_now          the process ends without closing anything itself
StartError                  one line on stderr, code 2
any other exception         a traceback, code 1
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from typing import NoReturn

import uvloop

from common.errors import StartError


class Stop:
    """Whether somebody asked this process to end."""

    def __init__(self) -> None:
        self.requested = asyncio.Event()

    def listen(self) -> None:
        """Takes over SIGINT and SIGTERM in the running loop."""
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)
        # Whoever started this process may have held them back until now (deploy/tied.py).
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})

    def _on_signal(self, number: int) -> None:
        if self.requested.is_set():
            sys.stderr.flush()
            os._exit(128 + number)
        self.requested.set()


def run_process(main: Callable[[Stop], Awaitable[int]]) -> NoReturn:
    """Runs main in an event loop and ends the process with the code it returns."""
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            code = runner.run(_run(main))
    except* StartError as errors:
        print(f"error: {_first(errors)}", file=sys.stderr)
        code = 2
    sys.exit(code)


def end_now(code: int) -> NoReturn:
    """Ends the process; its connections are closed by the kernel, so that calls which no handler has seen yet end UNAVAILABLE.
    grpc.aio.Server.stop() would end those CANCELLED (grpc/grpc#41785), and nobody calls a cancelled call again."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _first(error: BaseException) -> BaseException:
    """The first exception of a group, however deep: a StartError may come out of a task group."""
    return _first(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


async def _run(main: Callable[[Stop], Awaitable[int]]) -> int:
    stop = Stop()
    stop.listen()
    return await main(stop)
