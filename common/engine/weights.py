"""Where a model's tensors come from: safetensors files, or random numbers of the right shape (load_format "dummy")."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
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
        """The tensor, contiguous. Raises StartError naming file and tensor if it is missing or of another shape."""

    def has(self, name: str) -> bool: ...


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
        self._file_of: dict[str, Any] = {}
        self._path_of: dict[str, Path] = {}
        for path in model.weight_files:
            try:
                file = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise StartError(f"cannot read weights {path}: {error}") from None
            for name in file.keys():  # type: ignore[no-untyped-call]  # noqa: SIM118
                self._file_of[name], self._path_of[name] = file, path

    def has(self, name: str) -> bool:
        return name in self._file_of

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        if name not in self._file_of:
            raise StartError(f"weights in {self._model.path} have no tensor {name}")
        tensor: torch.Tensor = self._file_of[name].get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise StartError(f"{self._path_of[name]}: tensor {name} must have shape {list(shape)}, got {list(tensor.shape)}")
        if not tensor.is_floating_point():
            raise StartError(f"{self._path_of[name]}: tensor {name} must be floating point, got {tensor.dtype}")
        return tensor.to(self._device, self._dtype).contiguous()


class DummyWeights:
    """Random tensors that keep activations near unit variance; the same ones for the same seed."""

    def __init__(self, *, dtype: torch.dtype, device: str, seed: int = 0) -> None:
        self._dtype = dtype
        self._device = device
        self._generator = torch.Generator(device).manual_seed(seed)

    def has(self, name: str) -> bool:
        return True

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
