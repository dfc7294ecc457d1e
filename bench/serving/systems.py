"""System: what is measured, as a value: its name, and how it comes to be there."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.geometries import GEOMETRIES, write_model
from tests.helpers.process import Process

READY = r"^router ready on (\S+)$"
START_SECONDS = 300.0
STOP_SECONDS = 60.0


@dataclass(frozen=True)
class System:
    """router: the address of one that runs already. Else launch: what deploy.run_local is told to start it."""

    name: str
    router: str = ""
    launch: tuple[str, ...] = ()

    @contextmanager
    def running(self, logs: Path) -> Iterator[str]:
        """The router's address; a launched system is stopped at the end. Its output goes to logs."""
        if self.router:
            yield self.router
            return
        logs.mkdir(parents=True, exist_ok=True)
        log = logs / f"{self.name}.log"
        log.unlink(missing_ok=True)
        process = Process("deploy.run_local", ["--port", "0", *self.launch], log=log)
        try:
            yield process.wait_for_line(READY, within=START_SECONDS)[1]
        finally:
            if process.is_alive:
                process.signal(signal.SIGINT)
            try:
                process.wait(within=STOP_SECONDS)
            finally:
                process.kill()


@dataclass(frozen=True)
class Deployment:
    """What a local system is made of. model: a folder, a name of bench/geometries.py, or as of make run-local.
    both_args, prefill_args, decode_args, colocated_args: options of the workers, as one text each."""

    model: str = ""
    device: str = "auto"
    prefill: int = 1
    decode: int = 1
    both_args: str = ""
    prefill_args: str = ""
    decode_args: str = ""
    colocated_args: str = ""
    options: tuple[str, ...] = ()

    def split(self) -> System:
        """Prefill workers and decode workers."""
        sides = ("--prefill", str(self.prefill), "--decode", str(self.decode))
        given = (*_args("prefill", self.both_args, self.prefill_args), *_args("decode", self.both_args, self.decode_args))
        return System(f"split-{self.prefill}p{self.decode}d", launch=(*self._shared(), *sides, *given))

    def colocated(self) -> System:
        """As many workers, each with both roles."""
        workers = self.prefill + self.decode
        sides = ("--prefill", "0", "--decode", str(workers))
        return System(
            f"colocated-{workers}",
            launch=(*self._shared(), *sides, *_args("decode", self.both_args, self.decode_args, self.colocated_args)),
        )

    def _shared(self) -> tuple[str, ...]:
        return ("--model", self.model, "--device", self.device, "--log-level", "warning", *self.options)


def _args(side: str, *texts: str) -> tuple[str, ...]:
    given = shlex.join([word for text in texts for word in shlex.split(text)])
    return (f"--{side}-args={given}",) if given else ()


def local_model(model: str, folder: Path) -> tuple[str, Sequence[str]]:
    """What --model and more options are for run_local: a geometry's name becomes a folder with a config and random weights."""
    if model in GEOMETRIES:
        return str(write_model(folder / model, model)), ("--load-format", "dummy")
    return model, ()
