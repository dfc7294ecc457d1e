"""What the event loop asks of the prefill engine. Plain immutable values; see prefill_worker/core.py for who answers how."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from common.core import Req
from common.descriptor import Descriptor
from common.handoff.base import Transport
from common.handoff.cuda_ipc import PoolExport
from common.work_key import WorkKey


@dataclass(frozen=True)
class Destination:
    """Where a request's pages go: one granted reservation.

    page_ids: the decode worker's pages of tokens prefix_len, prefix_len + page_size, ... of the input.
    prefix_len: leading tokens the decode worker holds already, whole pages; never sent.
    deadline: time.monotonic() seconds; no chunk starts and no page is copied after it unless extended.
    pair_id: names the mapping opened with OpenPool or OpenCudaPool; not used by grpc.
    verify: also take each sent page's CRC-32 (with grpc the sender takes it).
    ticket: names the reservation; with it the engine commits ahead of the event loop's Commit (cuda_ipc only). Empty: don't.
    """

    transport: Transport
    page_ids: tuple[int, ...]
    prefix_len: int
    deadline: float
    pair_id: str = ""
    verify: bool = False
    ticket: str = ""


@dataclass(frozen=True)
class Admit:
    """Wait for pages and a page table row. The engine owns req from now on. Reply: Admitted, deferred until it is its turn.

    Raises OutOfRange if it can never fit and AlreadyExists if the key is here.
    """

    req: Req


@dataclass(frozen=True)
class Admitted:
    """cached_tokens: leading tokens found in the prefix cache, so not computed again."""

    cached_tokens: int


@dataclass(frozen=True)
class Compute:
    """Start on an admitted request. destination: None if nothing is to be sent. An unknown key is ignored: it was forgotten."""

    key: WorkKey
    destination: Destination | None


@dataclass(frozen=True)
class Extend:
    """New lease deadlines. Unknown keys are ignored."""

    deadlines: Mapping[WorkKey, float]


@dataclass(frozen=True)
class Forget:
    """Drop a request in whatever state; an unknown key is fine. Whole computed pages go to the prefix cache, the rest is free.

    The reply (None) says that the engine neither writes to the request's destination nor needs its pages any more. The caller
    sees to it first that nobody else (the grpc sender) still reads them.
    """

    key: WorkKey


class ForOutlets:
    """Base of what concerns the ways out alone (prefill_worker/outlets.py)."""


@dataclass(frozen=True)
class SlotsFree(ForOutlets):
    """The pages of this request that lay in these slots are sent. Only where pages are announced by slot."""

    key: WorkKey
    slots: tuple[int, ...]


@dataclass(frozen=True)
class OpenPool(ForOutlets):
    """Map a decode worker's pool for Destinations with this pair_id. descriptor stays the caller's. Reply: None."""

    pair_id: str
    descriptor: Descriptor
    pool_bytes: int
    page_bytes: int


@dataclass(frozen=True)
class OpenCudaPool(ForOutlets):
    """Connect socket_name and map a decode worker's GPU memory for Destinations with this pair_id. Reply: None. Raises
    FailedPrecondition if this engine has no GPU or it can't be mapped."""

    pair_id: str
    export: PoolExport
    socket_name: str
    page_bytes: int


@dataclass(frozen=True)
class AwaitPoolEnd(ForOutlets):
    """Reply: None, deferred until the decode worker behind an OpenCudaPool closes its connection, which is how its death shows.
    At once if there is no such pool; never if ClosePool comes first: give the call up then."""

    pair_id: str


@dataclass(frozen=True)
class ClosePool(ForOutlets):
    """Unmap; the reply (None) says that no write through it is possible any more. An unknown pair_id is fine."""

    pair_id: str


@dataclass(frozen=True)
class FlushPrefixCache:
    """Drop cached pages that nobody uses. Reply: how many."""


@dataclass(frozen=True)
class Check:
    """Reply: PageCounts, after checking that every page and row has exactly one owner (else the engine ends)."""
