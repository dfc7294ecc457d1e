"""Acquaintance: the current pairing with whichever decode worker answers at one address."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from common.engine.handle import EngineHandle
from common.errors import Unavailable
from common.rpc.gen.pdserve.v1 import decode_pb2_grpc
from prefill_worker.errands import Errands
from prefill_worker.pairing import Pairing, open_pairing
from prefill_worker.terms import Terms


class Acquaintance:
    """Event loop only. At most one pairing is current; the ones before it live on until nothing holds them."""

    def __init__(
        self,
        stub: decode_pb2_grpc.DecodeServiceStub,
        *,
        address: str,
        terms: Terms,
        engine: EngineHandle,
        errands: Errands,
        on_gone: Callable[[Pairing], None],
    ) -> None:
        """on_gone: the decode worker of a pairing has ended (seen with shm and cuda_ipc)."""
        self._stub = stub
        self._address = address
        self._terms = terms
        self._engine = engine
        self._errands = errands
        self._on_gone = on_gone
        self._current: Pairing | None = None
        self.has_ended = False
        """The decode worker met last is known to have ended."""
        self._lock = asyncio.Lock()

    async def pairing_with(self, decode_worker: str) -> Pairing:
        """The current pairing, or a new one if there is none with that worker. Raises PairingRefused, Unavailable if another
        worker (a successor on the same port) answers, or what Pair failed with."""
        async with self._lock:
            pairing = self._current
            if pairing is None or pairing.worker_id != decode_worker:
                # As an errand: a link that is half open when its caller is cancelled would have no owner.
                pairing = await self._errands.run(self._introduce())
            if pairing.worker_id != decode_worker:
                raise Unavailable(f"decode worker {decode_worker} is gone: {pairing.worker_id} answers at {self._address}")
            return pairing

    def drop(self, pairing: Pairing) -> None:
        """Not to be used for anything new. Idempotent."""
        pairing.retire()
        if self._current is pairing:
            self._current = None

    async def close(self) -> None:
        if (pairing := self._current) is not None:
            self.drop(pairing)
            await pairing.closed()

    async def _introduce(self) -> Pairing:
        pairing = await open_pairing(
            self._stub, address=self._address, terms=self._terms, engine=self._engine, on_gone=self._gone
        )
        if self._current is not None:
            self._current.retire()
        self._current = pairing
        self.has_ended = False
        return pairing

    def _gone(self, pairing: Pairing) -> None:
        self.has_ended |= self._current is pairing  # Older pairings with it end, too, sooner or later than the current one.
        self.drop(pairing)
        self._on_gone(pairing)
