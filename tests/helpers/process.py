"""A process under test: started, its output read, signalled, ended; what it was at when a test fails."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from weakref import WeakSet

from tests.helpers.warm import Warm, WarmProcess

ROOT = Path(__file__).resolve().parents[2]
WORKERS = ("prefill_worker", "decode_worker")
START_SECONDS = 40.0


def free_port() -> int:
    """A port nobody listened on a moment ago, of those that the kernel gives to nobody by itself: else a connection of a test
    beside this one might get it before whoever is to listen there has started."""
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    ports = [*range(10_000, first), *range(last + 1, 65_536)] or range(first, last)
    while True:
        port: int = random.SystemRandom().choice(ports)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
                return port
            except OSError:
                continue


@cache
def _warm() -> Warm:
    """One for the whole test run."""
    return Warm()


_known: WeakSet[Process] = WeakSet()


def last_words() -> list[tuple[str, str]]:
    """(which, how it stands and the end of its output) of every process of the test run that somebody still holds. One that was
    forked writes the stack of each of its threads there first: a test that waits for what does not come says what is at fault."""
    asked = [process for process in _known if isinstance(process._popen, WarmProcess) and process.is_alive]
    for process in asked:
        process.signal(signal.SIGUSR2)
    time.sleep(0.3 if asked else 0.0)
    return [(f"{process.module} {process.pid}", process.last_words()) for process in sorted(_known, key=lambda known: known.pid)]


class Process:
    """`python -m module args`, its output in a file; a worker with torch already imported (tests/helpers/warm.py)."""

    def __init__(self, module: str, args: Sequence[str], *, log: Path, env: dict[str, str] | None = None) -> None:
        self.module, self.args, self.log = module, list(args), log
        self._popen: subprocess.Popen[bytes] | WarmProcess
        _known.add(self)
        log.touch()
        # Not those of who runs the tests (PDSERVE_CHAOS_SEED, say): they would be settings, or a warning.
        ours = {name: value for name, value in os.environ.items() if not name.startswith("PDSERVE_")}
        whole = ours | {"PYTHONUNBUFFERED": "1"} | (env or {})
        # With a PYTHONPATH of its own it may be meant to begin otherwise: then it begins from nothing.
        if module in WORKERS and "PYTHONPATH" not in whole:
            self._popen = WarmProcess(_warm(), module, self.args, log=log.absolute(), env=whole)
            return
        with log.open("ab") as out:
            self._popen = subprocess.Popen(
                # Tied: a test run that is killed leaves no processes behind.
                [sys.executable, "-m", "deploy.tied", str(os.getpid()), sys.executable, "-m", module, *args],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=whole,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def is_alive(self) -> bool:
        return self._popen.poll() is None

    def wait_for_line(self, pattern: str, *, within: float = START_SECONDS) -> re.Match[str]:
        """Waits until the output matches; fails at once, with the output, if the process ends first."""
        deadline = time.monotonic() + within
        while True:
            alive = self.is_alive
            if found := re.search(pattern, self.output, re.MULTILINE):
                return found
            assert alive, f"{self.module} ended with {self._popen.returncode}:\n{self.output[-3000:]}"
            assert time.monotonic() < deadline, f"no {pattern!r} from {self.module} in {within} s:\n{self.output[-3000:]}"
            time.sleep(0.02)

    def last_words(self) -> str:
        code = self._popen.poll()
        return f"{'runs' if code is None else f'ended with {code}'}: {' '.join(self.args)}\n{self.output[-3000:]}"

    def signal(self, number: int) -> None:
        self._popen.send_signal(number)

    def pause(self) -> None:
        self.signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.signal(signal.SIGCONT)

    def wait(self, *, within: float) -> int:
        """The exit code; fails with the output if it does not end."""
        try:
            return self._popen.wait(within)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.module} still runs after {within} s:\n{self.output[-3000:]}") from None

    def kill(self) -> None:
        """kill -9, and the corpse collected."""
        self._popen.kill()
        self._popen.wait()

    def stop(self, *, within: float = 10.0) -> int:
        self.signal(signal.SIGTERM)
        return self.wait(within=within)
