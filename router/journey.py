"""One request's way, from its tokenized prompt to its last Finished.

1. Placed: an attempt is begun for its completions (router/attempts.py).
2. Waiting: nothing is written until the first token is there, then Started.
3. Streaming: tokens arrive through Dispatch whenever they like; the writer takes what has gathered, at the pace of its Outlet.
4. Ended: every completion has sent its Finished, or the call has one status. However it ends, close() frees the workers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import timedelta

from common.errors import PdserveError, ResourceExhausted
from common.rpc.gen.pdserve.v1 import generation_pb2
from common.work import FinishReason
from router.attempts import Attempts
from router.completion import Completion
from router.pacing import Outlet
from router.patience import Patience
from router.stopwatch import Stopwatch
from router.text.output import PLAIN_TOKEN_BYTES

MAX_UNREAD_BYTES = 2 << 20
"""Output kept for a client that does not read it: 65,536 tokens, or 1,736 with 20 logprobs each (CAP-05)."""
LAST_WRITE_SECONDS = 1.0
"""How long a reader may take for what is under way when its call ends with a status."""

Write = Callable[[generation_pb2.GenerateResponse], Awaitable[None]]


class Journey:
    """The CompletionEvents of its completions. run() is the only one that writes to the call."""

    def __init__(
        self,
        request_id: str,
        *,
        prompt_tokens: int,
        outlet: Outlet,
        stopwatch: Stopwatch,
        token_bytes: int = PLAIN_TOKEN_BYTES,
        slow_client_timeout: timedelta = timedelta(minutes=1),
    ) -> None:
        """token_bytes: what an unread token takes. slow_client_timeout: longest wait for the client to read."""
        self.request_id = request_id
        self._token_bytes = token_bytes
        self._slow_client_timeout = slow_client_timeout
        self._patience = Patience(slow_client_timeout.total_seconds(), on_end=self._stalled)
        self._prompt_tokens = prompt_tokens
        self._outlet = outlet
        self._stopwatch = stopwatch
        self._completions: Sequence[Completion] = ()
        self._open: Sequence[Completion] = ()
        self._error: Exception | None = None
        self._is_started = False
        self._unread = 0
        self._writer: asyncio.Task[object] | None = None
        self._is_cut = False
        self._attempts: Attempts

    def prepare(self, completions: Sequence[Completion], attempts: Attempts) -> None:
        """Before run(): the two need the journey to be made, and it them."""
        self._completions = self._open = completions
        self._attempts = attempts

    @property
    def uid(self) -> int:
        """Of its first completion."""
        return self._completions[0].uid

    @property
    def last_attempt(self) -> int | None:
        """The highest number that one of its completions has come to; None before any."""
        return max(completion.attempts for completion in self._completions) or None

    @property
    def output_tokens(self) -> int:
        return sum(completion.output.count for completion in self._completions)

    @property
    def is_placed(self) -> bool:
        """Some worker has been given it."""
        return self._attempts.pair is not None

    async def run(self, write: Write, *, on_first_token: Callable[[], None]) -> None:
        """Returns after the last Finished. Raises the status the call ends with. Cancelling it cancels all work."""
        self._writer = asyncio.current_task()
        try:
            self._attempts.begin()
            while self._open:
                await self._outlet.wait()
                responses = self._take()
                if responses and not self._is_started:
                    on_first_token()
                    responses = self._start(responses)
                for response in responses:
                    self._patience.begin()
                    await write(response)
                self._patience.done()
                if responses:
                    self._outlet.wrote()
                if self._error is not None and self._open:
                    raise self._error
        except asyncio.CancelledError:
            if self._is_cut and self._writer is not None and self._writer.uncancel() == 0 and self._error is not None:
                raise self._error from None
            raise
        finally:
            self._writer = None
            self._patience.close()
            self.close()

    def end(self, error: Exception | None) -> None:
        """From outside: Finished(ABORT) for what still runs (None), or this status for the call. Workers are told at once."""
        if error is None:
            self._abort()
        elif self._error is None:
            self._error = error
            self.close()
            # A writer that waits for its reader would never raise it.
            asyncio.get_running_loop().call_later(LAST_WRITE_SECONDS, self._cut)
        self._outlet.touch_now()

    def close(self) -> None:
        """No work is left on any worker. Synchronous and idempotent."""
        self._outlet.close()
        self._attempts.close()

    def token_arrived(self, completion: Completion, now: float) -> None:
        self._unread += self._token_bytes
        if completion.finish is not None:
            self._attempts.finished(completion)
            self._outlet.touch_now()
            return
        if completion.output.matched_stop is not None:
            self._stop(completion)
            self._outlet.touch_now()
            return
        self._outlet.touch(now)
        if self._unread > MAX_UNREAD_BYTES:
            limit = MAX_UNREAD_BYTES // self._token_bytes
            self.end(ResourceExhausted(f"the client leaves too much unread, the limit is {limit} tokens of this kind"))

    def gap_too_wide(self, completion: Completion) -> None:
        error = PdserveError(f"token {len(completion.token_ids)} of completion {completion.number} did not come")
        self._attempts.failed(completion, error, retryable=True, blame=frozenset())

    def _stop(self, completion: Completion) -> None:
        """A stop string was found."""
        was_running = completion.finish is None
        completion.finish = FinishReason.STOP
        if was_running:
            self._attempts.stop(completion)

    def _abort(self) -> None:
        running = [completion for completion in self._completions if completion.finish is None]
        for completion in running:
            completion.finish = FinishReason.ABORT
        for completion in running:
            self._attempts.stop(completion)

    def _stalled(self) -> None:
        seconds = self._slow_client_timeout.total_seconds()
        self.end(ResourceExhausted(f"the client has read nothing for {seconds:g} s (--slow-client-timeout)"))

    def _cut(self) -> None:
        if self._writer is not None:
            self._is_cut = True
            self._writer.cancel()

    def _take(self) -> list[generation_pb2.GenerateResponse]:
        """What has gathered, per completion its deltas and then its Finished."""
        now = time.monotonic()
        responses: list[generation_pb2.GenerateResponse] = []
        for completion in self._open:
            output = completion.output
            taken = output.take(ended=completion.finish is not None)
            if output.matched_stop is not None:
                self._stop(completion)
            if taken:
                self._stopwatch.sending(completion.number, count=output.count, now=now)
                responses += taken
            if completion.finish is not None and self._error is None:
                self._open = [other for other in self._open if other is not completion]
                responses.append(self._finish(completion, now))
        self._unread = 0
        return responses

    def _start(self, responses: list[generation_pb2.GenerateResponse]) -> list[generation_pb2.GenerateResponse]:
        """With Started in front; an abort before the first token has none."""
        if not any(completion.token_ids for completion in self._completions):
            return responses
        self._is_started = True
        pair = self._attempts.pair
        assert pair is not None, "a token without an attempt"
        started = generation_pb2.Started(
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._attempts.cached_tokens,
            prefill_worker=pair.prefill.id,
            decode_worker=pair.decode.id if pair.decode is not None else "",
        )
        return [generation_pb2.GenerateResponse(request_id=self.request_id, started=started), *responses]

    def _finish(self, completion: Completion, now: float) -> generation_pb2.GenerateResponse:
        assert completion.finish is not None
        usage = generation_pb2.Usage(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=completion.output.count,
            cached_tokens=self._attempts.cached_tokens,
        )
        finished = generation_pb2.Finished(
            reason=generation_pb2.FinishReason.Name(completion.finish),
            matched_stop=completion.output.matched_stop or "",
            usage=usage,
            timing=self._stopwatch.timing(completion, self._attempts.prefill_started_at, now),
        )
        return generation_pb2.GenerateResponse(request_id=self.request_id, index=completion.number, finished=finished)
