"""What the decode engine tells the event loop unasked. Plain immutable values, delivered in the order of emission."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from common.engine.handle import Urgent
from common.work import PageCounts, TokenOut, WorkFailure
from common.work_key import WorkKey


@dataclass(frozen=True)
class TicketOpened:
    """The event loop may store Push frames of this ticket into these pages (grpc only). Comes before the Reserve's reply."""

    ticket: str
    page_ids: tuple[int, ...]


@dataclass(frozen=True)
class TicketClosed:
    """Stop storing into this ticket's pages and answer Drained (grpc only). reason: empty if it was committed."""

    ticket: str
    reason: str


@dataclass(frozen=True)
class SlotFree(Urgent):
    """Answers StorePage: the page is in the pool."""

    slot: int


@dataclass(frozen=True)
class HandedOver:
    """A request may run here. exposed_seconds: since its prompt was computed, by this host's clock."""

    exposed_seconds: float


@dataclass(frozen=True)
class PrefillStarted(Urgent):
    """The first chunk of a prompt that this worker computes itself is about to be launched. key: of the first completion."""

    key: WorkKey
    cached_tokens: int


@dataclass(frozen=True)
class StepTokens:
    """The tokens of one step for one router: one per request, two in a request's first step, which repeats its first token (not
    if it was made here)."""

    router_epoch: int
    tokens: tuple[TokenOut, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        # As flat rows: a step of 256 tokens is packed in a ninth of the time, and every step crosses to the event loop.
        return _step_tokens, (self.router_epoch, [(tuple(token.key), *token[1:]) for token in self.tokens])


def _step_tokens(router_epoch: int, rows: list[tuple[Any, ...]]) -> StepTokens:
    new = tuple.__new__  # Past the constructors, which would cost more than all else here.
    return StepTokens(router_epoch, tuple([new(TokenOut, (new(WorkKey, row[0]), *row[1:])) for row in rows]))


@dataclass(frozen=True)
class Retracted:
    """Out of pages (or this worker is leaving): the router runs this again as a new attempt."""

    key: WorkKey


@dataclass(frozen=True)
class Holding:
    """Answers Inquire. is_committed: it waits for a place in the batch, or runs."""

    key: WorkKey
    is_committed: bool


@dataclass(frozen=True)
class Failed:
    """The attempt ended here without its router or its prefill worker having asked for it."""

    failure: WorkFailure


class StateCounts(NamedTuple):
    """How many are in each state of decode_worker/states.py: tickets in the first two, completions in the others."""

    reserved: int = 0
    receiving: int = 0
    committed: int = 0
    running: int = 0
    leaving: int = 0


@dataclass(frozen=True)
class Stats:
    """How things stand; sent at most once a step, and only when something changed. See WorkerLoad.

    computed_tokens: prompt tokens computed here since the start.
    """

    running: int
    waiting: int
    pages: PageCounts
    queued_tokens: int = 0
    states: StateCounts = StateCounts()
    computed_tokens: int = 0
