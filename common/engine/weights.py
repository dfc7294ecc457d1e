"""Where a model's tensors come from: safetensors files, or random numbers of the right shape (load_format "dummy")."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from common.errors import StartError
from common.model_dir import ModelDir

PROGRESS_SECONDS = 1.0


class WeightSource(Protocol):
    """Gives tensors by their checkpoint names, in the dtype and on the device it was made for."""

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        """The tensor, contiguous, the caller's to keep. Raises StartError naming it if it is missing or of another shape."""


def stacked(source: WeightSource, parts: Sequence[tuple[str, int]], *rest: int) -> torch.Tensor:
    """Several (name, rows) tensors as one, one below the other: a fused projection. rest: the other dimensions."""
    return torch.cat([source.tensor(name, rows, *rest) for name, rows in parts])


class SafetensorsWeights:
    """Reads one tensor at a time, so that loading needs little more memory than the model."""

    def __init__(self, model: ModelDir, *, dtype: torch.dtype, device: str) -> None:
        """Opens every shard; raises StartError for one that is not safetensors."""
        self._model = model
        self._dtype = dtype
        self._device = device
        self._path_of: dict[str, Path] = {}
        for path in model.weight_files:
            with _opened(path) as file:
                self._path_of |= dict.fromkeys(file.keys(), path)

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        path = self._path_of.get(name)
        if path is None:
            raise StartError(f"weights in {self._model.path} have no tensor {name}")
        # Opened anew and copied: a tensor that stays in the mapped file keeps all of it resident.
        with _opened(path) as file:
            tensor: torch.Tensor = file.get_tensor(name)
            if tuple(tensor.shape) != shape:
                raise StartError(f"{path}: tensor {name} must have shape {list(shape)}, got {list(tensor.shape)}")
            if not tensor.is_floating_point():
                raise StartError(f"{path}: tensor {name} must be floating point, got {tensor.dtype}")
            return tensor.to(self._device, self._dtype, copy=True)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        file = safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise StartError(f"cannot read weights {path}: {error}") from None
    with file:
        yield file


class DummyWeights:
    """Random tensors that keep activations near unit variance; the same ones for the same seed."""

    def __init__(self, *, dtype: torch.dtype, device: str, seed: int = 0) -> None:
        self._dtype = dtype
        self._device = device
        self._generator = torch.Generator(device).manual_seed(seed)

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        if len(shape) == 1:
            return torch.full(shape, 0.0 if name.endswith("bias") else 1.0, dtype=self._dtype, device=self._device)
        values = torch.randn(*shape, generator=self._generator, device=self._device)
        return (values / math.sqrt(shape[1])).to(self._dtype)


class Progress:
    """Passes on a line at most every PROGRESS_SECONDS."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._last = time.monotonic()

    def __call__(self, text: str) -> None:
        if (now := time.monotonic()) - self._last >= PROGRESS_SECONDS:
            self._last = now
            self._report(text)
