"""How many KV pages a worker's pool gets.

On the CPU the configuration says. On a GPU a worker may use --memory-fraction of the card's total memory in all, and the pool is
what the rest of the worker leaves of it:

    0                                                        fraction * total              total
    | context | weights, workspace | reserved: graphs | pool |   other workers, head room   |
    '-- used: what is there when the pool is sized ----'
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from common.engine.config import EngineConfig
from common.errors import StartError

MIB = 1 << 20
CONTEXT_BYTES = 600 * MIB
"""A CUDA context with its loaded kernels, which torch's allocator does not count."""


class CardMemory(NamedTuple):
    """Bytes of a GPU: in all, free to anybody, and taken by this process."""

    total: int
    free: int
    used: int

    @classmethod
    def read(cls, device: str) -> CardMemory:
        """Now. What torch has cached and nobody uses is given back first."""
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        return cls(total, free, torch.cuda.memory_reserved(device) + CONTEXT_BYTES)


def size_pool(config: EngineConfig, *, page_bytes: int, reserved_bytes: int = 0) -> int:
    """The pool's pages. On a GPU call it once the weights and workspaces are there. Raises StartError if none fits.

    reserved_bytes: what the worker will allocate after its pool (captured graphs)."""
    if config.pool_pages is not None:
        return config.pool_pages
    card = CardMemory.read(config.device)
    return pages_that_fit(config, card, page_bytes=page_bytes, reserved_bytes=reserved_bytes)


def pages_that_fit(config: EngineConfig, card: CardMemory, *, page_bytes: int, reserved_bytes: int = 0) -> int:
    """The same, of given figures."""
    assert config.memory_fraction is not None, "a pool without a fixed size is a GPU's"
    allowed = int(card.total * config.memory_fraction)
    room = min(allowed - card.used, card.free) - reserved_bytes
    if config.pool_bytes is not None:
        room = min(room, config.pool_bytes)
    if (pages := room // page_bytes) < 1:
        raise StartError(
            f"no room for a KV pool on {config.device}: --memory-fraction {config.memory_fraction:g} of {card.total / MIB:.0f} "
            f"MiB is {allowed / MIB:.0f}, weights and workspace take {card.used / MIB:.0f}, graphs {reserved_bytes / MIB:.0f}, "
            f"{card.free / MIB:.0f} are free, a page needs {page_bytes / MIB:.1f}"
        )
    return pages


def tell_use(config: EngineConfig, progress: Callable[[str], None]) -> None:
    """What the worker came to take, once everything is there, of what it may."""
    card = CardMemory.read(config.device)
    allowed = int(card.total * (config.memory_fraction or 1.0))
    beyond = ", MORE than --memory-fraction allows" if card.used > allowed else ""
    progress(
        f"{config.device}: {card.used / MIB:.0f} MiB used of {allowed / MIB:.0f} allowed and {card.total / MIB:.0f} there{beyond}"
    )
