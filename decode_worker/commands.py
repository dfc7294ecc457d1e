"""What the event loop asks of the decode engine. Plain immutable values; decode_worker/core.py says who acts on each."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from common.core import Req
from common.handoff.base import Transport
from common.work import TokenOut
from common.work_key import WorkKey


@dataclass(frozen=True)
class SessionOpened:
    """A router's stream is there: from now on Reserve is taken for its requests."""

    router_epoch: int


@dataclass(frozen=True)
class SessionClosed:
    """A router's stream is gone: all its work is dropped. Always between two SessionOpened of one router."""

    router_epoch: int


@dataclass(frozen=True)
class Reserve:
    """Wait for pages for a prompt. The engine owns req from now on. Reply: Granted, deferred until it is its turn.

    Raises Unavailable (no session with that router, or draining), Aborted (the key was cancelled, or is while it waits),
    AlreadyExists (the key has a ticket or runs), InvalidRequest or OutOfRange (it never will fit), FailedPrecondition (the
    pairing ended while it waited).
    """

    req: Req
    pair_id: str
    transport: Transport
    verify: bool = False


@dataclass(frozen=True)
class Prefill:
    """Compute a prompt here and decode it (--local-prefill always). The engine owns req from now on. Nobody waits for a reply:
    PrefillStarted, StepTokens from token 0 on, Retracted and Failed tell its router how it goes.

    deadline: clock seconds; the first token is made before it, or the request fails.
    """

    req: Req
    deadline: float


@dataclass(frozen=True)
class Granted:
    """A ticket: pages to fill, in order, from token prefix_len on. The lease runs out that long after this, unless renewed."""

    ticket: str
    page_ids: tuple[int, ...]
    prefix_len: int
    lease: timedelta


@dataclass(frozen=True)
class Renew:
    """Extend leases. Reply: list of those tickets that are not being received (any more)."""

    tickets: tuple[str, ...]


@dataclass(frozen=True)
class Commit:
    """All KV is there (with grpc the caller has seen to it). Reply: None, and None again for a while after, however often and
    in whichever order with other commands it comes: the first one counts.

    first_tokens: their keys' epochs do not count, for a token names none on the wire. computed_at: when the last chunk had been
    computed, in time.monotonic() seconds of this host; 0.0: not said. Raises InvalidRequest (first_tokens do not fit the ticket),
    FailedPrecondition (pages are missing), DataLoss (a checksum differs; the ticket has ended), Aborted
    (the ticket had ended: says why), NotFound.
    """

    ticket: str
    first_tokens: tuple[TokenOut, ...]
    pages_sent: int
    page_crc32: tuple[int, ...] = ()
    computed_at: float = 0.0


@dataclass(frozen=True)
class CommitAhead:
    """The same from the sender's engine itself, which does not wait for its gRPC: that one's answer counts, so this one may be
    wrong or late without anybody being told. Taken for tickets of that pairing whose KV the sender stores."""

    pair_id: str
    commit: Commit


@dataclass(frozen=True)
class Release:
    """Give a ticket back unused; an unknown one is fine. drained: the sender writes no more. Reply: None."""

    ticket: str
    drained: bool


@dataclass(frozen=True)
class Cancel:
    """Stop an attempt in whatever state it is; a later Reserve of the key is refused for one lease."""

    key: WorkKey


@dataclass(frozen=True)
class Inquire:
    """A router asks whether an attempt goes on here without its prefill worker. Answered by the event Holding."""

    key: WorkKey


@dataclass(frozen=True)
class StorePage:
    """All bytes of one of a ticket's pages are in this slot of shared memory: put them into the pool. Answered by SlotFree. Sent
    before what relies on it: Commit, and Drained."""

    slot: int
    page_id: int


@dataclass(frozen=True)
class Drained:
    """The event loop writes no more into this ticket's pages. Answers TicketClosed."""

    ticket: str


@dataclass(frozen=True)
class SenderGone:
    """The process behind a pairing is gone or has unmapped the pool: it writes no more into any page."""

    pair_id: str


@dataclass(frozen=True)
class FlushPrefixCache:
    """Drop cached pages that nobody uses. Reply: how many."""


@dataclass(frozen=True)
class Check:
    """Reply: PageCounts, after checking that every page has exactly one owner (else the engine ends)."""


@dataclass(frozen=True)
class Drain:
    """Take no more Reserves and turn away those in line; what has pages goes on. Reply: None, once nothing is left."""


@dataclass(frozen=True)
class HandBack:
    """Give everything that is left back to the routers."""


@dataclass(frozen=True)
class Undrain:
    """Take Reserves again."""


Command = (
    SessionOpened
    | SessionClosed
    | Reserve
    | Prefill
    | Renew
    | Commit
    | CommitAhead
    | Release
    | Cancel
    | Inquire
    | StorePage
    | Drained
    | SenderGone
    | FlushPrefixCache
    | Check
    | Drain
    | HandBack
    | Undrain
)
