"""Precedence: who goes first: higher priority, then arrival. Uids are minted in order of arrival and kept over attempts."""

from __future__ import annotations

from common.core import Req

Precedence = tuple[int, int, int]


def precedence_of(req: Req) -> Precedence:
    """Sorts ascending: the first is served first, the last is retracted first."""
    return (-req.priority, req.uid, req.router_epoch)
