"""Order: a request as its router submitted it."""

from __future__ import annotations

from dataclasses import dataclass

from common.core import Req


@dataclass(frozen=True)
class Order:
    """decode_worker: the id of the worker expected at decode_address (host:port); both are empty if nothing is to be handed over.
    deadline: clock seconds."""

    req: Req
    decode_address: str
    decode_worker: str
    deadline: float
