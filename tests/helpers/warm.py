"""Workers that begin with torch imported: forked from one process that has it, which saves 1.4 s of processor time for each.

A worker so made is a process like any other: its own session, signals, files and memory, tied to the test run. What it runs is
the same `__main__`. The process they are forked from (python -m tests.helpers.warm SOCKET) imports torch and nothing of ours, has
one thread, and reports what it forked and how each ended, a JSON object a line:

    {"module": "decode_worker", "args": [...], "log": "...", "env": {...}, "cwd": "..."}   --->
                                                                                           <---   {"pid": 1}
                                                                                           <---   {"pid": 1, "code": -9}
"""

from __future__ import annotations

import faulthandler
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from common.engine.threads import limit_spinning
from common.tied import die_with_parent

ROOT = Path(__file__).resolve().parents[2]


class Warm:
    """The test run's end. Any thread: a test may start one worker while it waits for another in a thread."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        line = [sys.executable, "-m", "tests.helpers.warm", str(theirs.fileno()), str(os.getpid())]
        self._process = subprocess.Popen(line, cwd=ROOT, pass_fds=[theirs.fileno()], start_new_session=True)
        theirs.close()
        self._lines = Lines(ours)
        self._codes: dict[int, int] = {}
        self._lock = threading.Lock()

    def fork(self, module: str, args: list[str], *, log: Path, env: dict[str, str]) -> int:
        """The pid of a process that runs the module as __main__."""
        with self._lock:
            self._lines.write({"module": module, "args": args, "log": str(log), "env": env})
            while "code" in (told := self._read()):
                pass
            pid = int(told["pid"])
            self._codes.pop(pid, None)  # A long run on a busy machine gets some number a second time.
            return pid

    def code(self, pid: int) -> int | None:
        """How it ended, as subprocess says it; None: it has not."""
        with self._lock:
            while pid not in self._codes and self._lines.is_ready:
                self._read()
            return self._codes.get(pid)

    def _read(self) -> dict[str, Any]:
        told = self._lines.read()
        assert told is not None, "the process that workers are forked from has ended"
        if "code" in told:
            self._codes[told["pid"]] = told["code"]
        return told


class Lines:
    """JSON objects, a line each, on a socket."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self._received = b""

    @property
    def is_ready(self) -> bool:
        """read() would not wait long."""
        return b"\n" in self._received or bool(select.select([self.socket], [], [], 0)[0])

    def write(self, value: dict[str, Any]) -> None:
        self.socket.sendall(json.dumps(value).encode() + b"\n")

    def read(self) -> dict[str, Any] | None:
        """Waits for the next; None when the other end is gone."""
        while b"\n" not in self._received:
            if not (data := self.socket.recv(65536)):
                return None
            self._received += data
        line, self._received = self._received.split(b"\n", 1)
        value: dict[str, Any] = json.loads(line)
        return value


class WarmProcess:
    """What tests.helpers.cluster uses of a subprocess.Popen."""

    def __init__(self, warm: Warm, module: str, args: list[str], *, log: Path, env: dict[str, str]) -> None:
        self._warm = warm
        self.pid = warm.fork(module, args, log=log, env=env)

    @property
    def returncode(self) -> int | None:
        return self._warm.code(self.pid)

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.returncode) is None:
            if deadline is not None and time.monotonic() >= deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
            time.sleep(0.005)
        return code

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def main() -> None:
    descriptor, parent = map(int, sys.argv[1:])
    die_with_parent(parent)
    limit_spinning()
    import torch  # noqa: F401

    lines = Lines(socket.socket(fileno=descriptor))
    woken, wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    while True:
        if woken in select.select([lines.socket.fileno(), woken], [], [])[0]:
            os.read(woken, 4096)
        _report_ended(lines)
        while lines.is_ready:
            if (told := lines.read()) is None:
                return
            pid = os.fork()
            if pid == 0:
                _run(told, lines.socket, wakes)
            lines.write({"pid": pid})


def _report_ended(lines: Lines) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        lines.write({"pid": pid, "code": os.waitstatus_to_exitcode(status)})


def _run(told: dict[str, Any], connection: socket.socket, wakes: int) -> None:
    """In the child: never returns."""
    code = 1
    try:
        die_with_parent(os.getppid())
        # As deploy/tied.py: held back until the module listens.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        connection.close()
        os.close(wakes)
        out = os.open(told["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(out, 1)
        os.dup2(out, 2)
        faulthandler.register(signal.SIGUSR2)  # For tests.helpers.process.last_words().
        os.environ.clear()
        os.environ.update(told["env"])
        sys.argv = [told["module"], *told["args"]]
        runpy.run_module(told["module"], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        code = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
