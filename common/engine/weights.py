"""Where a model's tensors come from: safetensors files, or random numbers of the right shape (load_format "dummy").

A tensor is made where it will stay and filled there, the parts of a fused projection one below the other: loading needs little
more memory than the model, on the CPU and on a GPU.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from common.errors import StartError
from common.model_dir import ModelDir

PROGRESS_SECONDS = 1.0
GIB = 1 << 30
FLOAT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""What a checkpoint's tensors may be, as safetensors names it. Smaller floats come with scales, which nothing here reads."""


class Progress:
    """Reports how much is loaded: a line at most every PROGRESS_SECONDS, and one at the end. total_bytes: 0 if not known."""

    def __init__(self, report: Callable[[str], None], *, total_bytes: int = 0) -> None:
        self._report = report
        self._of = f" of {total_bytes / GIB:.2f}" if total_bytes else ""
        self._tensors = self._bytes = 0
        self._began = self._last = time.monotonic()

    def add(self, size_bytes: int) -> None:
        """One more tensor is there."""
        self._tensors += 1
        self._bytes += size_bytes
        if (now := time.monotonic()) - self._last >= PROGRESS_SECONDS:
            self._last = now
            self._report(f"loading weights: {self._tensors} tensors, {self._bytes / GIB:.2f}{self._of} GiB")

    def finish(self) -> None:
        size, seconds = self._bytes / GIB, max(time.monotonic() - self._began, 1e-9)
        self._report(f"loaded {self._tensors} tensors, {size:.2f} GiB in {seconds:.1f} s ({size / seconds:.2f} GiB/s)")


class WeightSource(ABC):
    """Gives tensors by their checkpoint names, in this dtype and on this device."""

    def __init__(self, progress: Progress, *, dtype: torch.dtype, device: str) -> None:
        self.dtype = dtype
        self.device = device
        self._progress = progress

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        """The tensor, contiguous, the caller's to keep. Raises StartError naming it if it is missing or of another shape."""
        return self.stacked([(name, shape[0])], *shape[1:])

    def stacked(self, parts: Sequence[tuple[str, int]], *rest: int) -> torch.Tensor:
        """Several (name, rows) tensors as one, one below the other: a fused projection. rest: the other dimensions."""
        sizes = [self._check(name, (rows, *rest)) for name, rows in parts]
        whole = torch.empty(sum(rows for _, rows in parts), *rest, dtype=self.dtype, device=self.device)
        start = 0
        for (name, rows), size in zip(parts, sizes, strict=True):
            self._fill(whole[start : start + rows], name)
            self._progress.add(size)
            start += rows
        return whole

    def finish(self) -> None:
        """Everything wanted was given: waits until it is there and reports it."""
        if torch.device(self.device).type == "cuda":
            torch.cuda.synchronize(self.device)
        self._progress.finish()

    @abstractmethod
    def _check(self, name: str, shape: tuple[int, ...]) -> int:
        """The bytes that will be read or made. Raises StartError if there is no such tensor. Before memory is taken for it."""

    @abstractmethod
    def _fill(self, target: torch.Tensor, name: str) -> None:
        """Writes the tensor, whose shape was checked, into target."""


class _Entry(NamedTuple):
    path: Path
    shape: tuple[int, ...]
    dtype: str

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * FLOAT_BYTES.get(self.dtype, 0)


class SafetensorsWeights(WeightSource):
    """Copies from the mapped file straight to where the tensor stays, on a GPU too."""

    def __init__(self, model: ModelDir, report: Callable[[str], None], *, dtype: torch.dtype, device: str) -> None:
        """Reads every shard's header; raises StartError for one that is not safetensors."""
        self._model = model
        self._entries = {name: entry for path in model.weight_files for name, entry in _entries(path)}
        total = sum(entry.size_bytes for entry in self._entries.values())
        super().__init__(Progress(report, total_bytes=total), dtype=dtype, device=device)

    def _check(self, name: str, shape: tuple[int, ...]) -> int:
        entry = self._entries.get(name)
        if entry is None:
            raise StartError(f"weights in {self._model.path} have no tensor {name}")
        if entry.shape != shape:
            raise StartError(f"{entry.path}: tensor {name} must have shape {list(shape)}, got {list(entry.shape)}")
        if entry.dtype not in FLOAT_BYTES:
            raise StartError(f"{entry.path}: tensor {name} must be one of {', '.join(FLOAT_BYTES)}, got {entry.dtype}")
        return entry.size_bytes

    def _fill(self, target: torch.Tensor, name: str) -> None:
        # Opened anew: a mapping that stays keeps all of the file that was read resident.
        with _opened(self._entries[name].path) as file:
            given: torch.Tensor = file.get_tensor(name)
            # Of another dtype, it is converted on target's device: torch would do it before the copy, on the CPU.
            target.copy_(given if given.dtype == target.dtype else given.to(target.device))


def _entries(path: Path) -> list[tuple[str, _Entry]]:
    """By tensor, from the file's header alone."""
    with _opened(path) as file:
        slices = [(name, file.get_slice(name)) for name in file.keys()]  # noqa: SIM118 - it is no dict
        return [(name, _Entry(path, tuple(part.get_shape()), part.get_dtype())) for name, part in slices]


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        file = safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise StartError(f"cannot read weights {path}: {error}") from None
    with file:
        yield file


class DummyWeights(WeightSource):
    """Random tensors that keep activations near unit variance; the same ones for the same seed and kind of device."""

    def __init__(self, report: Callable[[str], None], *, dtype: torch.dtype, device: str, seed: int = 0) -> None:
        super().__init__(Progress(report), dtype=dtype, device=device)
        self._generator = torch.Generator(device).manual_seed(seed)

    def _check(self, name: str, shape: tuple[int, ...]) -> int:
        return math.prod(shape) * self.dtype.itemsize

    def _fill(self, target: torch.Tensor, name: str) -> None:
        if target.dim() == 1:
            target.fill_(0.0 if name.endswith("bias") else 1.0)
        elif target.device.type == "cpu":
            # In float32 first, so that every dtype has the same numbers.
            target.copy_(torch.randn(*target.shape, generator=self._generator) / math.sqrt(target.shape[1]))
        else:
            target.normal_(0.0, target.shape[1] ** -0.5, generator=self._generator)


def open_weights(
    model: ModelDir, report: Callable[[str], None], *, load_format: str, dtype: torch.dtype, device: str
) -> WeightSource:
    """report: gets a line now and then. Raises StartError for a file that is not safetensors."""
    if load_format == "dummy":
        return DummyWeights(report, dtype=dtype, device=device)
    return SafetensorsWeights(model, report, dtype=dtype, device=device)
