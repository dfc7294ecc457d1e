"""DecodeDescription: what a decode worker's event loop learns of its engine."""

from __future__ import annotations

from dataclasses import dataclass

from common.engine.handle import EngineDescription
from common.handoff.cuda_ipc import PoolExport


@dataclass(frozen=True)
class DecodeDescription(EngineDescription):
    """cuda_pool: the KV pool as prefill workers of this host may map it; None: they may not (cuda_ipc is not offered)."""

    cuda_pool: PoolExport | None = None
