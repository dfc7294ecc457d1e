"""How a process of ours begins and ends.

SIGINT, SIGTERM or SIGHUP   (SIGHUP unless it was ignored at start, as by nohup)
          first             stop.requested is set; main drains and returns; while stop.at_once() holds the process ends, code 0
          second            the process ends at once, code 130, 143 or 129
main returns                its value is the exit code
main calls end_now          the process ends without closing anything itself
StartError                  one line on stderr, code 2
any other exception         a traceback, code 1
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import uvloop

from common.address import Address, UnixAddress
from common.errors import StartError
from common.log_output import complain

log = logging.getLogger(__name__)
T = TypeVar("T")


class Stop:
    """Whether somebody asked this process to end."""

    def __init__(self) -> None:
        self.requested = asyncio.Event()
        self._at_once: list[Address | None] = []

    def listen(self) -> None:
        """Takes over the signals in the running loop."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)
        # Whoever started this process may have held them back until now (deploy/tied.py).
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})

    @contextmanager
    def at_once(self, address: Address | None = None) -> Iterator[None]:
        """Within it nothing has been taken on that would have to be ended in order, and what goes on in threads, imports and the
        loading of weights, cannot be interrupted. address: where the process listens."""
        self._at_once.append(address)
        try:
            yield
        finally:
            self._at_once.pop()

    async def or_end(self, starting: Coroutine[Any, Any, T]) -> T | None:
        """What starting returns. None, with starting cancelled, if this process is asked to end before."""
        task = asyncio.create_task(starting)
        asked = asyncio.create_task(self.requested.wait())
        await asyncio.wait((task, asked), return_when=asyncio.FIRST_COMPLETED)
        asked.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait([task])
        return None if task.cancelled() else task.result()

    def _on_signal(self, number: int) -> None:
        if self.requested.is_set():
            end_now(128 + number)
        self.requested.set()
        if self._at_once:
            log.info("stopped while starting")
            end_now(0, address=self._at_once[-1])


def run_process(main: Callable[[Stop], Awaitable[int]]) -> NoReturn:
    """Runs main in an event loop and ends the process with the code it returns."""
    _raise_file_limit()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            code = runner.run(_run(main))
    except* StartError as errors:
        complain(str(_first(errors)))
        code = 2
    sys.exit(code)


def _raise_file_limit() -> None:
    """As many connections as the system allows: what is usual to begin with, 1,024, is a limit for programs that use select()."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # Some systems call it unlimited and mean less.
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def end_now(code: int, *, address: Address | None = None) -> NoReturn:
    """Ends the process; its connections are closed by the kernel, so that calls which no handler has seen yet end UNAVAILABLE.
    grpc.aio.Server.stop() would end those CANCELLED (grpc/grpc#41785), and nobody calls a cancelled call again. address: where it
    has listened; a unix socket goes with it."""
    if isinstance(address, UnixAddress):
        Path(address.host).unlink(missing_ok=True)
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # Nobody may read it any more, or it is closed.
            stream.flush()
    os._exit(code)


def _first(error: BaseException) -> BaseException:
    """The first exception of a group, however deep: a StartError may come out of a task group."""
    return _first(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


async def _run(main: Callable[[Stop], Awaitable[int]]) -> int:
    stop = Stop()
    stop.listen()
    return await main(stop)
