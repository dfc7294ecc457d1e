"""Which processes a local cluster has, and what each of them is told."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from common.address import Address

CARD_PERCENT = 90
"""Of a GPU's memory, what all workers on it may use together; the workers' own default for one that is alone."""


class Command(NamedTuple):
    """One process. threads: what it may compute with; None: it computes nothing."""

    name: str
    line: tuple[str, ...]
    threads: int | None = None

    @property
    def env(self) -> dict[str, str]:
        return {} if self.threads is None else {"OMP_NUM_THREADS": str(self.threads)}


class Options(NamedTuple):
    """What the cluster is asked to be. prefill: 0: the decode workers compute the prompts too. max_context, dtype: as the workers
    take them, None for their defaults. load_format: of the workers; dummy needs no weight files.
    prefill_args, decode_args: what each worker of a side is told besides."""

    model: Path
    router: Address
    prefill: int = 1
    decode: int = 1
    max_context: int | None = None
    dtype: str | None = None
    load_format: str | None = None
    log_level: str = "info"
    prefill_args: tuple[str, ...] = ()
    decode_args: tuple[str, ...] = ()


def place(device: str, *, gpus: int, prefill: int, decode: int) -> list[str]:
    """Each worker's device, prefill workers first: GPUs in turn, so that two GPUs have a side each. Raises ValueError."""
    if device not in ("auto", "cpu", "cuda"):
        raise ValueError(f"DEVICE must be auto, cpu or cuda, got {device!r}")
    if device == "cpu" or (device == "auto" and gpus == 0):
        return ["cpu"] * (prefill + decode)
    # DEVICE=cuda without a GPU goes to the engine as it is: it says what it misses.
    return [f"cuda:{worker % max(1, gpus)}" for worker in range(prefill + decode)]


def plan(options: Options, *, devices: Sequence[str], cores: int) -> list[Command]:
    """The router first, then the workers in the order of devices."""
    # Never more threads than cores in all: they spin while they wait for each other. On two cores, two threads for each of two
    # workers made one lonely stream a third faster, and cut a stream beside a burst of prompts from 44 to 12 tokens/s.
    threads = max(1, cores // (options.prefill + options.decode))
    names = [f"prefill{i}" for i in range(options.prefill)] + [f"decode{i}" for i in range(options.decode)]
    context = () if options.max_context is None else ("--max-context", str(options.max_context))
    shared = ("--model", str(options.model), "--log-level", options.log_level, *context)
    python = (sys.executable, "-m")
    commands = [Command("router", (*python, "router", *shared, "--listen", str(options.router)))]
    on_device = Counter(devices)
    for name, device in zip(names, devices, strict=True):
        module, more = (
            ("prefill_worker", options.prefill_args) if name.startswith("prefill") else ("decode_worker", options.decode_args)
        )
        line = (*python, module, *shared, "--router", str(options.router), "--device", device)
        if options.dtype is not None:
            line += ("--dtype", options.dtype)
        if options.load_format is not None:
            line += ("--load-format", options.load_format)
        if options.prefill == 0:
            line += ("--local-prefill", "always")
        if device == "cpu":
            line += ("--threads", str(threads))
        elif on_device[device] > 1:
            line += ("--memory-fraction", f"{CARD_PERCENT // on_device[device] / 100:g}")
        commands.append(Command(name, (*line, *more), threads=threads))
    return commands
