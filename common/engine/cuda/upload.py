"""UploadRing: pinned host memory for small uploads, so that neither the host nor the device waits for the copy."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


class UploadRing:
    """A ring of pinned buffers with a device buffer each. Engine thread only.

    A slot is written again only when the copy out of it has been done; the device side of a slot is ordered by the stream.
    """

    def __init__(self, elements: int, *, dtype: torch.dtype, device: torch.device, slots: int = 4) -> None:
        """elements: of one upload, at most."""
        self._host = [torch.empty(elements, dtype=dtype, pin_memory=device.type == "cuda") for _ in range(slots)]
        self._views: list[NDArray[Any]] = [host.numpy() for host in self._host]
        self._device = [torch.empty(elements, dtype=dtype, device=device) for _ in range(slots)]
        self._copied = [torch.cuda.Event() if device.type == "cuda" else None for _ in range(slots)]
        self._next = 0

    def upload(self, values: NDArray[Any]) -> torch.Tensor:
        """values: [n], n <= elements -> [n] on the device, valid on the current stream until `slots` more uploads."""
        slot, self._next = self._next, (self._next + 1) % len(self._host)
        event, count = self._copied[slot], len(values)
        if event is not None:
            event.synchronize()
        np.copyto(self._views[slot][:count], values, casting="same_kind")
        on_device = self._device[slot][:count]
        on_device.copy_(self._host[slot][:count], non_blocking=True)
        if event is not None:
            event.record()
        return on_device
