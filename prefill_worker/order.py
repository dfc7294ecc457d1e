"""Order: a request as its router submitted it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from common.core import Req
from common.logs import about


@dataclass(frozen=True)
class Order:
    """decode_worker: the id of the worker expected at decode_address (host:port); both are empty if nothing is to be handed over.
    deadline: clock seconds."""

    req: Req
    decode_address: str
    decode_worker: str
    deadline: float

    @property
    def extra(self) -> dict[str, Any]:
        """For log lines about it."""
        return about(self.req.request_id, uid=self.req.uid, attempt=self.req.attempt)
