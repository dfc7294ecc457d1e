"""Lease: one ticket as this worker holds it, and until when it may be relied on.

P sends Reserve or Renew ---> D counts from here ---------------------- lease_ms ---------> D's deadline
|---------------- SAFE_SHARE of lease_ms ---------> P's deadline: no chunk starts, no page is copied after it
'- P counts from here, so its deadline is the earlier one whatever the network or a stopped process did in between
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from common.errors import PdserveError
from common.logs import about
from common.work_key import WorkKey
from prefill_worker.commands import Destination
from prefill_worker.pairing import Pairing

SAFE_SHARE: Final = 0.8
OnLost = Callable[[PdserveError], None]


@dataclass(eq=False)
class Lease:
    """One granted ticket. deadline: this worker's, in clock seconds. on_lost: called once if it ends before its time."""

    key: WorkKey
    request_id: str
    ticket: str
    pairing: Pairing
    page_ids: tuple[int, ...]
    prefix_len: int
    length_seconds: float
    deadline: float
    on_lost: OnLost
    is_committing: bool = False
    """Whether Commit is under way: its answer decides then, as the ticket ends with it."""

    @property
    def extra(self) -> dict[str, Any]:
        """For log lines about it."""
        return about(self.request_id, uid=self.key.uid, attempt=self.key.attempt)

    def destination(self, *, verify: bool) -> Destination:
        """Where the engine is to put the request's pages. verify: with checksums."""
        return Destination(
            transport=self.pairing.transport,
            page_ids=self.page_ids,
            prefix_len=self.prefix_len,
            deadline=self.deadline,
            pair_id=self.pairing.pair_id,
            verify=verify,
            ticket=self.ticket,
        )
