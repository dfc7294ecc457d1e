"""RequestQueue: where requests wait until a worker has room for them.

A request that finds room, and nobody waiting who goes before it, goes at once. The others wait here rather than in the workers'
queues: here a cancel costs nothing, priority and fairness still count, and workers are chosen as late as possible. Who goes next
is router/queueing/line.py's and router/queueing/turns.py's to say.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import timedelta

from common.errors import PdserveError, ResourceExhausted
from router.fleet.fleet import ANY, Fleet
from router.fleet.pace import Pace
from router.fleet.workers import Worker
from router.queueing.answers import Answer, Answers
from router.queueing.forecast import Forecast
from router.queueing.line import Line
from router.queueing.room import RoomRule
from router.queueing.turns import Turn, next_turn
from router.queueing.waiter import Waiter

LOOKAHEAD = 16
"""How many of the line may be next, of those that some worker could take: whoever is first and finds no room is bypassed by
these alone."""
AVOID_SECONDS = 2.0
"""How long it waits for room on others than those that failed it: whoever is silent is known to be by then."""
LULL_SECONDS = 1.0
"""Without a line, after which a line is a new one: how long answers of other requests held up others says nothing of it."""
HINT_SECONDS = 0.1
"""How long what was said of when to try again, in whole seconds, is said again."""


class RequestQueue:
    """A RegistryListener. Event loop only."""

    def __init__(
        self, fleet: Fleet, *, rule: RoomRule, longest_wait: timedelta, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """longest_wait: of a request, however far its deadline is."""
        self._fleet = fleet
        self._rule = rule
        self._longest_wait = longest_wait
        self._clock = clock
        self._line = Line()
        self._pace = Pace()
        """Of prompts that were computed while somebody waited, for the first time each: what runs again gets nobody forward."""
        self._empty_since: float | None = None
        self._answers = Answers()
        self._is_serving_soon = False
        self._hint: tuple[float, timedelta] | None = None
        """When it was made, and when to try again."""
        fleet.registry.listen(self)

    def __len__(self) -> int:
        return len(self._line)

    @property
    def tokens(self) -> int:
        """Of the prompts that wait and have not begun."""
        return self._line.tokens

    def enter(self, waiter: Waiter) -> None:
        """Calls waiter.go at once if it is its turn, waiter.refuse if that would come too late; else it waits."""
        if not self._line and self._fleet.is_idle:
            self._pace, self._answers = Pace(), Answers()  # Nothing is left of what held up others, however short ago.
        self._line.add(waiter)
        self._serve()
        if waiter not in self._line:
            return
        self._end_lull()
        self._note_pace()
        if not waiter.is_begun and (error := self._forecast(waiter).why_not_wait(self._time_left(waiter))) is not None:
            self._refuse(waiter, error)
            return
        loop, seconds = asyncio.get_running_loop(), self._longest_wait.total_seconds()
        waiter.timer = loop.call_later(seconds, self._waited_too_long, waiter)
        if waiter.ask.avoid:
            waiter.pardon = loop.call_later(AVOID_SECONDS, self._avoid_nobody, waiter)
        self._watch(waiter)

    def enter_later(self, waiter: Waiter, *, delay_seconds: float) -> None:
        waiter.timer = asyncio.get_running_loop().call_later(delay_seconds, self.enter, waiter)

    def leave(self, waiter: Waiter) -> None:
        """It wants no turn any more. Idempotent."""
        waiter.unwatch()
        if waiter in self._line:
            self._line.remove(waiter, goes=False)
            self._serve_soon()

    def would_displace(self, priority: int, tenant: str) -> bool:
        """Whether displace() would find one."""
        return self._line.displaceable_for(priority, tenant) is not None

    def displace(self, priority: int, tenant: str, error: PdserveError) -> bool:
        """Refuses one that waits with this error, if there is one that has less of a right to its place than a newcomer."""
        if (waiter := self._line.displaceable_for(priority, tenant)) is None:
            return False
        self._refuse(waiter, error)
        return True

    def retry_after(self) -> timedelta:
        """When a request that came now would have its turn, if it waited; of thousands that are refused many get one answer."""
        now = self._clock()
        if self._hint is None or now - self._hint[0] > HINT_SECONDS:
            self._hint = now, self._forecast(None).retry_after
        return self._hint[1]

    def why_not_again(self, since: float) -> PdserveError | None:
        """The refusal of one whom workers that seemed to have room have given back since then; None if it may try again."""
        return self._too_long() if self._clock() - since >= self._longest_wait.total_seconds() else None

    def freed(self, tokens: int) -> None:
        """Work has ended somewhere. tokens: of a prompt that was computed for the first time, else 0."""
        self._look_for_places()
        if self._line:
            if tokens:
                self._note_pace(tokens)
            self._serve_soon()

    def held_up(self) -> None:
        """A worker's fault has held up work, for nobody knows how long: that was not the line's pace."""
        self._pace = Pace()
        self._note_pace()

    def answered(self, answer: Answer) -> None:
        """An answer has ended that no fault has held up."""
        self._answers.note(answer)
        self._look_for_places()

    def _look_for_places(self) -> None:
        if self._answers.waits_for_places and self._fleet.has_places:
            self._answers.forget_places()

    def joined(self, worker: Worker) -> None:
        pass

    def left(self, worker: Worker, *, with_last_words: bool) -> None:
        pass

    def changed(self) -> None:
        self._note_pace()
        for waiter in self._line.all():
            self._watch(waiter, was_in_line=True)
        self._serve_soon()

    def reported(self) -> None:
        if self._line:
            self._serve_soon()

    def _serve_soon(self) -> None:
        """Once for everything that happens in this turn of the event loop."""
        if not self._is_serving_soon:
            self._is_serving_soon = True
            asyncio.get_running_loop().call_soon(self._serve)

    def _serve(self) -> None:
        """Everybody whose turn it is goes."""
        self._is_serving_soon = False
        while self._line and (turn := self._next_turn()):
            if (error := self._why_not_go(turn.waiter)) is not None:
                self._refuse(turn.waiter, error)
                continue
            for other in turn.bypassed:
                other.bypassed += 1
            self._line.remove(turn.waiter, goes=True)
            turn.waiter.unwatch()
            self._fleet.placer.took(turn.pair, turn.waiter.ask)
            turn.waiter.go(turn.pair)
        if not self._line and self._empty_since is None:
            self._note_pace()
            self._empty_since = self._clock()

    def _end_lull(self) -> None:
        """Somebody waits."""
        if self._empty_since is not None and self._clock() - self._empty_since > LULL_SECONDS:
            self._pace = Pace()
        self._empty_since = None

    def _next_turn(self) -> Turn | None:
        return next_turn(self._line.leading(LOOKAHEAD), self._fleet.roster, rule=self._rule, placer=self._fleet.placer)

    def _refuse(self, waiter: Waiter, error: PdserveError) -> None:
        self.leave(waiter)
        waiter.refuse(error)

    def _why_not_go(self, waiter: Waiter) -> PdserveError | None:
        """Only of those that have waited: where nobody waits nothing is known of load."""
        if waiter.is_begun or waiter.timer is None:
            return None
        return self._forecast(waiter).why_not_go(self._time_left(waiter))

    def _time_left(self, waiter: Waiter) -> float | None:
        return None if waiter.deadline is None else waiter.deadline - self._clock()

    def _avoid_nobody(self, waiter: Waiter) -> None:
        """Those that failed it may idle while all others are full."""
        waiter.pardon, waiter.ask = None, waiter.ask._replace(avoid=frozenset())
        self._serve_soon()

    def _waited_too_long(self, waiter: Waiter) -> None:
        self._refuse(waiter, self._too_long())

    def _too_long(self) -> PdserveError:
        text = f"waited {self._longest_wait.total_seconds():g} s for a worker with room, the limit (--queue-wait)"
        return ResourceExhausted(text, retry_after=self.retry_after(), reason="waited_too_long")

    def _watch(self, waiter: Waiter, *, was_in_line: bool = False) -> None:
        """While no worker could ever take it, it waits no longer than the fleet says. was_in_line: while one could, perhaps."""
        has_seats = self._fleet.roster.seats(waiter.ask) is not None
        if waiter.search is None and not has_seats:
            waiter.search = asyncio.create_task(self._search(waiter, is_begun=waiter.is_begun or was_in_line))
        elif waiter.search is not None and has_seats:
            # At once: whoever stands behind it is not to go first.
            waiter.search.cancel()
            waiter.search = None

    async def _search(self, waiter: Waiter, *, is_begun: bool) -> None:
        try:
            await self._fleet.until_placeable(waiter.ask, is_begun=is_begun)
        except PdserveError as error:
            waiter.search = None
            self._refuse(waiter, error)
        else:
            waiter.search = None
            self._serve_soon()

    def _note_pace(self, tokens: int = 0) -> None:
        """Time in which nobody could be served, for want of a pair, is no part of it."""
        is_busy = len(self._line) > 0 and self._fleet.roster.seats(ANY) is not None
        self._pace.note(self._clock(), is_busy=is_busy, prompts=int(tokens > 0), tokens=tokens)

    def _forecast(self, waiter: Waiter | None) -> Forecast:
        """For one in line, or for somebody at its end."""
        workers = self._fleet.computing
        prompts, tokens = (self._line.prompts, self._line.tokens) if waiter is None else self._line.ahead_of(waiter)
        prompts += sum(worker.requests for worker in workers)
        tokens += sum(worker.queued_tokens for worker in workers)
        wait = self._pace.seconds_for(prompts=prompts, tokens=tokens)
        return Forecast(prompts, tokens, wait, 0.0 if waiter is None else self._service_of(waiter))

    def _service_of(self, waiter: Waiter) -> float:
        """Seconds, from its turn to the end of its answer."""
        paces = (worker.pace.seconds_for(prompts=1, tokens=waiter.tokens) for worker in self._fleet.computing)
        prompt = min((seconds for seconds in paces if seconds is not None), default=0.0)
        return prompt + self._answers.expected_seconds(waiter.output_tokens)
