"""The attempts at one request's completions: placing, submitting, cancelling, and beginning anew after a fault.

The first attempt is one submission for all n completions; a later one is for one completion, its prompt being the client's
prompt and the tokens there already are. One leg's fault cancels the other at once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from common.errors import PdserveError
from common.work import FinishReason
from router.attempt import Attempt, Work
from router.completion import Completion, Stage
from router.dispatch import Dispatch
from router.fleet.circuit import is_fault
from router.fleet.fleet import Fleet
from router.fleet.placement import Pair
from router.inquiries import Inquiries
from router.metrics import RouterMetrics
from router.places import Places
from router.queueing.request_queue import RequestQueue
from router.retries import RETURN_SECONDS, gave_up, is_in_order, pause_after_failures
from router.stake import Stake

log = logging.getLogger(__name__)


class Attempts:
    """The WorkEvents of one request's completions."""

    def __init__(
        self,
        work: Work,
        completions: Sequence[Completion],
        *,
        fleet: Fleet,
        queue: RequestQueue,
        dispatch: Dispatch,
        metrics: RouterMetrics,
        max_attempts: int,
        on_error: Callable[[Exception], None],
    ) -> None:
        """on_error: the request cannot go on, with this status."""
        self._work = work
        self._completions = completions
        self._fleet = fleet
        self._queue = queue
        self._dispatch = dispatch
        self._metrics = metrics
        self._max_attempts = max_attempts
        self._on_error = on_error
        self._inquiries = Inquiries(fleet, on_lost=self._lost_with_sender)
        self._places = Places(work, queue, on_turn=self._submit_all, on_error=on_error)
        self.pair: Pair | None = None
        self.cached_tokens = 0
        self.prefill_started_at: float | None = None

    def begin(self) -> None:
        self._places.take(tuple(self._completions))

    def prefill_started(self, completion: Completion, cached_tokens: int, now: float) -> None:
        if not any(member.token_ids for member in self._completions):
            # What the request finds of its own, from an attempt that failed, was not there before it.
            most = len(self._work.prompt) if self.prefill_started_at is None else self.cached_tokens
            self.cached_tokens = min(cached_tokens, most)
        if self.prefill_started_at is None:
            self.prefill_started_at = now
        completion.given_back_at = None
        if completion.attempt is not None:
            completion.attempt.stake.cached(cached_tokens)

    def handed_off(self, completion: Completion, now: float) -> None:
        if completion.stage is Stage.PREFILL:
            completion.move_to(Stage.DECODE)
            completion.avoid = frozenset()  # Others have served it since.
            assert completion.attempt is not None
            completion.attempt.stake.joined()
            self._fleet.circuits.succeeded(completion.attempt.pair)
            if completion.handed_off_at is None:
                completion.handed_off_at = now

    def sender_lost(self, completion: Completion, error: PdserveError) -> None:
        self._inquiries.begin(completion, error)

    def inquiry_answered(self, completion: Completion, *, is_committed: bool, now: float) -> None:
        if completion.stage is not Stage.PREFILL:
            return  # Its tokens came first.
        if is_committed:
            log.info("attempt %d goes on: its decode worker has it all", completion.attempt_number, extra=completion.extra)
            self.handed_off(completion, now)
        else:
            self._inquiries.fail(completion)

    def _lost_with_sender(self, completion: Completion, error: PdserveError) -> None:
        assert completion.attempt is not None
        self.failed(completion, error, retryable=True, blame=frozenset({completion.attempt.pair.prefill.id}))

    def retracted(self, completion: Completion) -> None:
        self._metrics.retracted()
        if completion.attempt is not None:
            completion.attempt.trace.failed("retracted")
        log.info("retracted after %d tokens, runs again", len(completion.token_ids), extra=completion.extra)
        self._withdraw(completion, cancel=False, restart="retraction")
        self._places.take((completion,))

    def handed_back(self, completion: Completion, reason: str) -> None:
        if (attempt := completion.attempt) is None:
            return
        self._metrics.retracted()
        log.info("handed back after %d tokens, runs again: %s", len(completion.token_ids), reason, extra=completion.extra)
        completion.avoid |= attempt.pair.ids
        attempt.trace.failed("handed back")
        self._withdraw(completion, cancel=True, restart="retraction")
        if completion.given_back_at is None:
            completion.given_back_at = time.monotonic()
        elif (error := self._queue.why_not_again(completion.given_back_at)) is not None:
            self._on_error(error)
            return
        self._places.take((completion,), delay=RETURN_SECONDS)

    def failed(self, completion: Completion, error: PdserveError, *, retryable: bool, blame: frozenset[str]) -> None:
        if (attempt := completion.attempt) is None:
            return
        self._metrics.attempt_failed(error)
        attempt.trace.failed(error.log_text)
        self._fleet.circuits.failed(attempt.pair, error, retryable=retryable, blame=blame)
        if is_fault(error, retryable=retryable):
            self._queue.held_up()
        level = logging.INFO if is_in_order(error) else logging.WARNING
        log.log(level, "attempt %d failed: %s", attempt.number, error, extra=completion.extra)
        # Until the hand-off a group stands and falls together.
        victims = [m for m in attempt.members if m.attempt is attempt and (m is completion or m.stage is Stage.PREFILL)]
        for victim in victims:
            victim.avoid |= blame or attempt.pair.ids
            self._withdraw(victim, cancel=True, restart="failure")
            victim.note_failure()
        if not retryable or completion.failures >= self._max_attempts:
            self._on_error(gave_up(error, attempts=completion.failures) if retryable else error)
            return
        delay = pause_after_failures(completion.failures)
        for victim in victims:
            self._places.take((victim,), delay=delay)

    def finished(self, completion: Completion) -> None:
        """Its last token has come: no worker works on it any more."""
        if completion.attempt is not None:
            self._fleet.circuits.succeeded(completion.attempt.pair)
        self._end(completion, is_computed=True)
        self._note_answer(completion)

    def stop(self, completion: Completion) -> None:
        """The client needs no more of it: cancels its work. Others of its group go on."""
        self._cancel(completion)
        if completion.finish is FinishReason.STOP:
            self._note_answer(completion)  # A stop string is an answer's end like any other; an abort says nothing of answers.

    def close(self) -> None:
        """Cancels whatever is under way. Synchronous, so that a cancelled call cannot cut it short (CAN-11). Idempotent."""
        self._places.close()
        self._inquiries.close()
        for completion in self._completions:
            self._cancel(completion)

    def _submit_all(self, members: tuple[Completion, ...], pair: Pair) -> None:
        """As one group, unless the decode worker could never reserve for all of them together."""
        if pair.decode is not None and self._places.pages(members) > pair.decode.profile.total_pages:
            for member in members:
                self._submit((member,), pair)
        else:
            self._submit(members, pair)

    def _submit(self, members: tuple[Completion, ...], pair: Pair) -> None:
        deadline_ms = self._work.deadline_ms()
        number = members[0].attempts + 1
        trace = self._work.trace.attempt(pair, uid=members[0].uid, number=number, members=len(members))
        attempt = Attempt(number, pair, members, self._stake(members, pair), trace)
        self.pair = pair
        self._fleet.circuits.sent(pair)
        for member in members:
            member.begin(attempt)
            self._dispatch.add(member, self)
        submit = attempt.message(self._work, deadline_ms)
        for worker in pair.workers:
            worker.attempts += 1
        self._metrics.attempt_begun(members[0].restart or "first")
        log.debug("attempt %d is on %s", attempt.number, " and ".join(sorted(pair.ids)), extra=members[0].extra)
        if (session := self._fleet.session(pair.prefill)) is not None:
            session.submit(submit)

    def _stake(self, members: tuple[Completion, ...], pair: Pair) -> Stake:
        tokens = len(self._work.prompt) + len(members[0].token_ids)
        is_first = members[0].attempts == 0
        return Stake(
            pair,
            members=len(members),
            tokens=tokens,
            pages=self._places.pages(members),
            on_freed=lambda tokens: self._queue.freed(tokens if is_first else 0),
        )

    def _withdraw(self, completion: Completion, *, cancel: bool, restart: str) -> None:
        """Back to PLACING."""
        if cancel:
            self._tell_workers(completion)
        self._dispatch.remove(completion)
        self._take_back(completion, is_computed=False)
        completion.withdraw(restart)

    def _cancel(self, completion: Completion) -> None:
        self._tell_workers(completion)
        self._end(completion, is_computed=False)

    def _end(self, completion: Completion, *, is_computed: bool) -> None:
        self._dispatch.remove(completion)
        if completion.stage is Stage.ENDED:
            return
        self._take_back(completion, is_computed=is_computed)
        completion.move_to(Stage.ENDED)
        self._places.give_up_ended()

    def _take_back(self, completion: Completion, *, is_computed: bool) -> None:
        """What it adds to its workers' loads."""
        if completion.attempt is not None:
            completion.attempt.trace.left()
            completion.attempt.stake.left(had_joined=completion.stage is Stage.DECODE, is_computed=is_computed)

    def _note_answer(self, completion: Completion) -> None:
        """Not of what a fault has held up: it is not how long answers take."""
        if not completion.failures and (answer := completion.answer(time.monotonic())) is not None:
            self._queue.answered(answer)

    def _tell_workers(self, completion: Completion) -> None:
        """Cancels its current attempt on each worker that has a part in it."""
        if (attempt := completion.attempt) is None:
            return
        for worker in attempt.pair.workers:
            if attempt.is_on(worker, completion.stage) and (session := self._fleet.session(worker)) is not None:
                session.cancel(completion.uid, attempt.number)
