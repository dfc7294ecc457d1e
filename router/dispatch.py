"""Where what workers say goes: by uid to the completion, if it is about its current attempt. The hot path of every token."""

from __future__ import annotations

import logging
import time
from collections import Counter
from typing import NamedTuple, Protocol

from common.errors import Leaving, PdserveError, from_status
from common.rpc.gen.pdserve.v1 import decode_pb2, prefill_pb2, work_pb2
from router.completion import Completion, Stage
from router.fleet.workers import Worker

log = logging.getLogger(__name__)


class WorkEvents(Protocol):
    """What happens to a completion's current attempt; implemented by Attempts."""

    def prefill_started(self, completion: Completion, cached_tokens: int, now: float) -> None: ...

    def handed_off(self, completion: Completion, now: float) -> None:
        """The decode worker has it. May be told more than once."""

    def sender_lost(self, completion: Completion, error: PdserveError) -> None:
        """Its prefill worker is gone before the hand-off was told; its decode worker may have it."""

    def inquiry_answered(self, completion: Completion, *, is_committed: bool, now: float) -> None:
        """By the decode worker that was asked after it."""

    def retracted(self, completion: Completion) -> None:
        """By a decode worker that has no page for it."""

    def handed_back(self, completion: Completion, reason: str) -> None:
        """By a worker that is leaving in order, or full."""

    def failed(self, completion: Completion, error: PdserveError, *, retryable: bool, blame: frozenset[str]) -> None:
        """blame: ids of the workers that may be at fault."""


class _Live(NamedTuple):
    completion: Completion
    events: WorkEvents


class Dispatch:
    """A SessionReceiver. Holds every completion some worker may still say something about."""

    def __init__(self) -> None:
        self._live: dict[int, _Live] = {}

    def __len__(self) -> int:
        return len(self._live)

    def stages(self) -> Counter[Stage]:
        """How many completions are in each stage. Also for the scraping thread."""
        return Counter(completion.stage for completion, _ in list(self._live.values()))

    def add(self, completion: Completion, events: WorkEvents) -> None:
        self._live[completion.uid] = _Live(completion, events)

    def remove(self, completion: Completion) -> None:
        """Idempotent."""
        self._live.pop(completion.uid, None)

    def decode_message(self, worker: Worker, message: decode_pb2.DecodeSessionResponse) -> None:
        match message.WhichOneof("message"):
            case "step":
                now = time.monotonic()
                for token in message.step.tokens:
                    live = self._live.get(token.uid)
                    if live is not None and (completion := live.completion).attempt_number == token.attempt:
                        if completion.stage is not Stage.DECODE:
                            self._decode_was_first(live, token, now)
                        completion.deliver(token, now)
            case "started":
                self._started(message.started)
            case "holding":
                if (live := self._find(message.holding)) is not None:
                    live.events.inquiry_answered(live.completion, is_committed=message.holding.committed, now=time.monotonic())
            case "retracted":
                if (live := self._find(message.retracted)) is not None:
                    live.events.retracted(live.completion)
            case "failure":
                # Before the hand-off (a lease ran out, say) the prefill worker is a suspect too.
                live = self._find(message.failure)
                is_shared = live is not None and live.completion.stage is Stage.PREFILL
                self._failed(message.failure, blame=frozenset() if is_shared else frozenset({worker.id}))

    def _decode_was_first(self, live: _Live, token: work_pb2.Token, now: float) -> None:
        """Its stream overtook the prefill worker's, whose news are then told from the repeated first token; or it has made this
        token itself."""
        if token.HasField("cached_tokens"):
            live.events.prefill_started(live.completion, token.cached_tokens, now)
        live.events.handed_off(live.completion, now)

    def prefill_message(self, worker: Worker, message: prefill_pb2.PrefillSessionResponse) -> None:
        now = time.monotonic()
        match message.WhichOneof("message"):
            case "first_token":
                if (live := self._find(message.first_token)) is not None:
                    live.completion.deliver(message.first_token, now)
            case "started":
                self._started(message.started)
            case "handed_off":
                if (live := self._find(message.handed_off)) is not None:
                    live.events.handed_off(live.completion, now)
            case "failure":
                if not self._is_taken_over(message.failure):
                    # It may have been the decode worker that failed it, so both are suspects.
                    self._failed(message.failure, blame=frozenset())

    def _is_taken_over(self, failure: work_pb2.Failure) -> bool:
        """The decode worker makes its tokens already, or those of another of its group: it was the answer to the Commit that was
        lost, not the request."""
        if (live := self._find(failure)) is None or (attempt := live.completion.attempt) is None:
            return False
        group = [member for member in attempt.members if member.attempt is attempt]
        taken_over = any(member.stage is Stage.DECODE for member in group)
        if taken_over:
            log.info("attempt %d goes on, although %s", attempt.number, failure.message, extra=live.completion.extra)
        return taken_over

    def _started(self, started: prefill_pb2.PrefillStarted) -> None:
        if (live := self._find(started)) is not None:
            live.events.prefill_started(live.completion, started.cached_tokens, time.monotonic())

    def session_ended(self, worker: Worker, error: PdserveError) -> None:
        for completion, events in list(self._live.values()):
            if (attempt := completion.attempt) is None or not attempt.is_on(worker, completion.stage):
                continue
            if isinstance(error, Leaving):
                events.handed_back(completion, str(error))
            elif completion.stage is Stage.PREFILL and attempt.pair.decode not in (None, worker):
                events.sender_lost(completion, error)
            else:
                events.failed(completion, error, retryable=True, blame=frozenset({worker.id}))

    def _find(
        self,
        about: work_pb2.Token
        | work_pb2.Failure
        | prefill_pb2.PrefillStarted
        | prefill_pb2.HandedOff
        | decode_pb2.Retracted
        | decode_pb2.Holding,
    ) -> _Live | None:
        """None unless it is about the current attempt."""
        live = self._live.get(about.uid)
        return live if live is not None and live.completion.attempt_number == about.attempt else None

    def _failed(self, failure: work_pb2.Failure, *, blame: frozenset[str]) -> None:
        if (live := self._find(failure)) is None:
            return
        if failure.handed_back:
            live.events.handed_back(live.completion, failure.message)
        else:
            error = from_status(failure.code, failure.message)
            live.events.failed(live.completion, error, retryable=failure.retryable, blame=blame)
