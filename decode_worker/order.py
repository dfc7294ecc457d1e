"""Who goes first: higher priority, then arrival. Uids are minted in order of arrival and kept over attempts."""

from __future__ import annotations

from common.core import Req

Order = tuple[int, int, int]


def order_of(req: Req) -> Order:
    """Sorts ascending: the first is served first, the last is retracted first."""
    return (-req.priority, req.uid, req.router_epoch)
