"""Peers: the decode workers this prefill worker knows, by address."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

from common.engine.handle import EngineHandle
from prefill_worker.decode_peer import DecodePeer
from prefill_worker.terms import Terms

IDLE_SECONDS: Final = 600.0
"""A peer unused that long is dropped, and one known to have ended when the next is met: decode workers come and go under new
addresses."""


class Peers:
    """Event loop only."""

    def __init__(self, *, terms: Terms, engine: EngineHandle, clock: Callable[[], float] = time.monotonic) -> None:
        self._terms = terms
        self._engine = engine
        self._clock = clock
        self._peers: dict[str, DecodePeer] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def at(self, address: str) -> DecodePeer:
        """The peer at this address, made on first use; nothing is sent to it yet."""
        if address not in self._peers:
            self._drop_idle()
            self._peers[address] = DecodePeer(address, terms=self._terms, engine=self._engine, clock=self._clock)
        return self._peers[address]

    async def close(self, *, patience_seconds: float = 1.0) -> None:
        """Once no request uses any of them."""
        peers, self._peers = self._peers, {}
        await asyncio.gather(*(peer.close(patience_seconds=patience_seconds) for peer in peers.values()), *self._closing)

    def _drop_idle(self) -> None:
        before = self._clock() - IDLE_SECONDS
        for address, peer in list(self._peers.items()):
            if peer.is_idle and (peer.has_ended or peer.last_used < before):
                del self._peers[address]
                task = asyncio.create_task(peer.close(), name=f"close peer {address}")
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)
