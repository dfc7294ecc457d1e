"""Which processes a local cluster has, and what each of them is told."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from common.address import Address
from decode_worker.config import Config as DecodeConfig


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
    take them, None for their defaults."""

    model: Path
    router: Address
    prefill: int = 1
    decode: int = 1
    max_context: int | None = None
    dtype: str | None = None
    log_level: str = "info"


def engine_takes_cuda() -> bool:
    """Whether this version's workers offer a GPU at all."""
    (field,) = (field for field in dataclasses.fields(DecodeConfig) if field.name == "device")
    choices = field.metadata["choices"]
    return choices is None or any(choice.startswith("cuda") for choice in choices)


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
    for name, device in zip(names, devices, strict=True):
        module = "prefill_worker" if name.startswith("prefill") else "decode_worker"
        line = (*python, module, *shared, "--router", str(options.router), "--device", device)
        if options.dtype is not None:
            line += ("--dtype", options.dtype)
        if options.prefill == 0:
            line += ("--local-prefill", "always")
        if device == "cpu":
            line += ("--threads", str(threads))
        commands.append(Command(name, line, threads=threads))
    return commands
