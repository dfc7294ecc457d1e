"""One completion: its tokens in order, whichever attempt and worker they come from, and where its work is now.

PLACING --submitted--> PREFILL --handed off--> DECODE --finished, cancelled--> ENDED
   ^----failed, retracted--'--------------------'          (every stage may end)
"""

from __future__ import annotations

from array import array
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, Protocol

from common.logs import about
from common.rpc.gen.pdserve.v1 import work_pb2
from common.work import FinishReason
from router.queueing.answers import Answer
from router.text.output import Output

if TYPE_CHECKING:
    from router.attempt import Attempt

MAX_HELD = 256
"""Tokens kept while an earlier one is missing."""

PROGRESS_TOKENS = 32
"""So many of one attempt are progress. Fewer may come of every attempt at a request that kills its workers, or can be handed over
to none: a prefill worker makes one each time."""


class Stage(Enum):
    """Where the work is. ENDED: no worker has anything of it."""

    PLACING = auto()
    PREFILL = auto()
    DECODE = auto()
    ENDED = auto()


MOVES = {
    Stage.PLACING: {Stage.PREFILL, Stage.ENDED},
    Stage.PREFILL: {Stage.DECODE, Stage.PLACING, Stage.ENDED},
    Stage.DECODE: {Stage.PLACING, Stage.ENDED},
    Stage.ENDED: set(),
}


class CompletionEvents(Protocol):
    """What a completion tells, synchronously."""

    def token_arrived(self, completion: Completion, now: float) -> None:
        """In order; its output and finish are up to date."""

    def gap_too_wide(self, completion: Completion) -> None:
        """More tokens came than may be held for a missing one."""


class Completion:
    """token_ids: all output so far, on all attempts; len() is the next index.
    attempt, attempt_number: the current one, None and 0 while none is under way. attempts: how many were begun.
    restart: why the next attempt is begun anew, "failure" or "retraction"; "" before the first.
    finish: why it is over for the client; None while it runs.
    failures: attempts that failed and count: those in a row without much progress. avoid: the workers they were on.
    given_back_at: by a worker, for the first time since one has taken it on: time.monotonic() seconds.
    """

    def __init__(self, *, uid: int, number: int, output: Output, events: CompletionEvents) -> None:
        """number: which of the request's completions, from 0."""
        self.uid = uid
        self.number = number
        self.output = output
        self.token_ids = array("i")
        self.stage = Stage.PLACING
        self.attempt: Attempt | None = None
        self.attempt_number = 0
        self.attempts = 0
        self.restart = ""
        self.finish: FinishReason | None = None
        self.failures = 0
        self._began_with = 0
        self._has_come_far = False
        self.avoid: frozenset[str] = frozenset()
        self.given_back_at: float | None = None
        self.first_token_at: float | None = None
        self.second_token_at: float | None = None
        self.handed_off_at: float | None = None
        self._events = events
        self._held: dict[int, work_pb2.Token] = {}

    @property
    def extra(self) -> dict[str, Any]:
        """For log lines about it."""
        return about(self.output.request_id, uid=self.uid, attempt=self.attempts or None)

    def move_to(self, stage: Stage) -> None:
        """The one door between stages."""
        assert stage in MOVES[self.stage], f"completion {self.uid}: {self.stage.name} -> {stage.name}"
        self.stage = stage

    def begin(self, attempt: Attempt) -> None:
        """A new attempt has been submitted."""
        self.move_to(Stage.PREFILL)
        self.attempt = attempt
        self.attempt_number = self.attempts = attempt.number
        self._began_with = len(self.token_ids)

    def note_failure(self) -> None:
        """Of the attempt that was withdrawn last. Where one since the last failure, this one or another that ended otherwise, had
        come far, it was well with the request: earlier failures say nothing of it."""
        self.failures = 1 if self._has_come_far else self.failures + 1
        self._has_come_far = False

    def withdraw(self, why: str) -> None:
        """The current attempt is over without the rest of its tokens; whatever still comes from it is ignored."""
        self.move_to(Stage.PLACING)
        self._has_come_far |= len(self.token_ids) - self._began_with >= PROGRESS_TOKENS
        self.restart = why
        self.attempt = None
        self.attempt_number = 0
        self._held.clear()

    def answer(self, now: float) -> Answer | None:
        """What its answer has been like, if it ends now; None without a token."""
        if (first := self.first_token_at) is None:
            return None
        joined = max(first, self.handed_off_at or first)
        second = max(joined, self.second_token_at or joined)
        return Answer(len(self.token_ids), joined - first, second - joined, now - second)

    def deliver(self, token: work_pb2.Token, now: float) -> None:
        """A token of the current attempt, from either worker. Doubles are dropped, later ones wait for the gap to close."""
        index, expected = token.index, len(self.token_ids)
        if index != expected:
            if index > expected:
                self._hold(token)
            return
        self._accept(token, now)
        while self._held and (later := self._held.pop(len(self.token_ids), None)) is not None:
            self._accept(later, now)

    def _hold(self, token: work_pb2.Token) -> None:
        if self.finish is not None:
            return
        if len(self._held) >= MAX_HELD:
            self._events.gap_too_wide(self)
            return
        copy = self._held[token.index] = work_pb2.Token()
        copy.CopyFrom(token)

    def _accept(self, token: work_pb2.Token, now: float) -> None:
        if self.finish is not None:
            return
        if self.first_token_at is None:
            self.first_token_at = now
        elif self.second_token_at is None:
            self.second_token_at = now
        self.token_ids.append(token.token_id)
        self.output.push(token)
        if token.finish:
            self.finish = FinishReason(token.finish)
        self._events.token_arrived(self, now)
