"""Pairs: the prefill workers that have introduced themselves since this worker's start, and how they may send."""

from __future__ import annotations

import secrets
from collections.abc import Callable

from common.errors import FailedPrecondition
from common.handoff.base import SENDER_WRITES, Transport

MAX_PAIRS = 1024


class Pairs:
    """Event loop only. A pairing that is forgotten costs its prefill worker a refused Reserve and a new Pair call."""

    def __init__(self, *, is_connected: Callable[[str, Transport], bool], max_pairs: int = MAX_PAIRS) -> None:
        """is_connected(pair_id, transport): its connection is open on which it was given this worker's pool to write to."""
        self._is_connected = is_connected
        self._max_pairs = max_pairs
        self._worker_of: dict[str, str] = {}
        """Pair id to the prefill worker's id, oldest first."""

    def __contains__(self, pair_id: str) -> bool:
        return pair_id in self._worker_of

    def add(self, prefill_worker: str) -> str:
        """A new pair id. The oldest pairing without an open connection makes room."""
        pair_id = secrets.token_hex(16)
        self._worker_of[pair_id] = prefill_worker
        if len(self._worker_of) > self._max_pairs:
            idle = (pair for pair in self._worker_of if not any(self._is_connected(pair, kind) for kind in SENDER_WRITES))
            self._worker_of.pop(next(idle, pair_id))
        return pair_id

    def drop(self, pair_id: str) -> None:
        self._worker_of.pop(pair_id, None)

    def check(self, pair_id: str, transport: Transport) -> None:
        """Raises FailedPrecondition: pair again."""
        if pair_id not in self._worker_of:
            raise FailedPrecondition("this decode worker does not know the pairing (it may have restarted): pair again")
        if transport in SENDER_WRITES and not self._is_connected(pair_id, transport):
            raise FailedPrecondition(f"the pairing's {transport} connection is not open: pair again")
