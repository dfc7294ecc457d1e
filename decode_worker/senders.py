"""Senders: the prefill workers that may write into this worker's pool, and the ways by which they come to it."""

from __future__ import annotations

from functools import partial

from common.engine.handle import EngineHandle
from common.handoff.base import Transport
from common.handoff.cuda_ipc import PoolExport
from common.handoff.cuda_ipc_receiver import CudaIpcReceiver
from common.handoff.pool_memory import PoolMemory
from common.handoff.shm_receiver import ShmReceiver
from decode_worker.commands import SenderGone
from decode_worker.commit_wire import commit_ahead_from_bytes
from decode_worker.pairs import Pairs


class Senders:
    """Event loop only. Tells the engine of each that is gone."""

    def __init__(self, memory: PoolMemory, *, offer_shm: bool, engine: EngineHandle) -> None:
        """offer_shm: senders may write into memory itself."""
        self._engine = engine
        self._offer_shm = offer_shm
        self._pairs = Pairs(is_connected=self._is_connected)
        self._shm = ShmReceiver(memory, is_known=self._pairs.__contains__, on_gone=self._on_shm_gone)
        self._cuda_ipc: CudaIpcReceiver | None = None

    def start(self) -> None:
        if self._offer_shm:
            self._shm.start()

    def offer(self, export: PoolExport) -> None:
        """The engine's pool is in GPU memory that senders may map."""
        self._cuda_ipc = CudaIpcReceiver(
            export.pool_bytes,
            is_known=self._pairs.__contains__,
            on_gone=self._on_cuda_gone,
            on_line=lambda pair_id, line: self._engine.listen(line, partial(commit_ahead_from_bytes, pair_id=pair_id)),
        )
        self._cuda_ipc.start()

    def pair(self, prefill_worker: str) -> str:
        """A pair id for a worker that is compatible."""
        return self._pairs.add(prefill_worker)

    def check(self, pair_id: str, transport: Transport) -> None:
        """Raises FailedPrecondition: pair again."""
        self._pairs.check(pair_id, transport)

    @property
    def shm_socket(self) -> str:
        """Empty: not offered."""
        return self._shm.socket_name if self._offer_shm else ""

    @property
    def cuda_ipc_socket(self) -> str:
        """Empty: not offered."""
        return "" if self._cuda_ipc is None else self._cuda_ipc.socket_name

    async def close(self) -> None:
        await self._shm.close()
        if self._cuda_ipc is not None:
            await self._cuda_ipc.close()

    def _is_connected(self, pair_id: str, transport: Transport) -> bool:
        if transport in ("shm", "sim"):
            return self._shm.is_connected(pair_id)
        return self._cuda_ipc is not None and self._cuda_ipc.is_connected(pair_id)

    def _on_shm_gone(self, pair_id: str) -> None:
        self._pairs.drop(pair_id)
        self._engine.post(SenderGone(pair_id))

    def _on_cuda_gone(self, pair_id: str) -> None:
        # The pairing stays: a sender whose GPU can't map the pool says goodbye, and goes on by grpc.
        self._engine.post(SenderGone(pair_id))
