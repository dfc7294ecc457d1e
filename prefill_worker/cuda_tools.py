"""CudaTools: what a prefill engine on a GPU needs to store into decode workers' pools."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from common.engine.kv_pool import KVPool
from common.handoff.cuda_driver import CudaBindings, CudaDriver

log = logging.getLogger(__name__)


class CopyPages(Protocol):
    def __call__(self, source_pages: Sequence[int], base: int, dest_pages: Sequence[int]) -> None:
        """Queues, on the stream that computes, the copy of whole pages of this worker's pool to pages of the pool at base."""


@dataclass(frozen=True)
class CudaTools:
    """driver: of the engine's GPU, for the engine's thread."""

    driver: CudaDriver
    copy_pages: CopyPages


def cuda_tools_for(pool: KVPool) -> CudaTools | None:
    """None if the pool is not on a GPU or this machine has not what it takes. Call it in the engine's thread."""
    device = pool.tensor.device
    if device.type != "cuda":
        return None
    try:
        driver = CudaBindings(device.index or 0)
    except ImportError as error:
        log.warning("no transport cuda_ipc: %s", error)
        return None
    kernels = importlib.import_module("common.engine.cuda.kernels")

    def copy_pages(source_pages: Sequence[int], base: int, dest_pages: Sequence[int]) -> None:
        both = torch.tensor([source_pages, dest_pages], dtype=torch.int64, pin_memory=True).to(device, non_blocking=True)
        kernels.copy_pages(pool.tensor, both[0], base, both[1])

    return CudaTools(driver, copy_pages)
