"""What the router does with a GenerateRequest.

1. validate    every field's rule, nothing tokenized; a full router does not even look
2. admit       a name nobody uses, and room in the queue
3. tokenize    long prompts in a thread; then the rules of a tokenized prompt
4. measure     how many tokens it may make, from the context and the pools
5. journey     place, stream, finish (router/journey.py)
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from array import array
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta

from common.errors import PdserveError
from common.logs import About, bind
from common.rpc.gen.pdserve.v1 import generation_pb2
from common.tracing import Tracing
from router.admission import Admission
from router.attempt import Work
from router.attempts import Attempts
from router.caller import Caller
from router.completion import Completion
from router.dispatch import Dispatch
from router.fleet.capacity import output_limit
from router.fleet.fleet import ANY, Fleet
from router.journey import Journey, Write
from router.metrics import RouterMetrics
from router.pacing import Outlet, Rounds
from router.queueing.request_queue import RequestQueue
from router.request.valid_request import MAX_ID_BYTES, Limits, ValidRequest
from router.request.validation import check_prompt, validate
from router.served_model import ServedModel
from router.stay import Stay
from router.stopwatch import Stopwatch
from router.text.output import Output, bytes_per_token
from router.text.text_stream import TextStream
from router.traces import RequestTrace
from router.uids import Uids

GOODBYE_SECONDS = 0.2
"""How long a name in use is waited for, in case its call was cancelled a moment ago."""


log = logging.getLogger(__name__)


class Pipeline:
    """One per router; lives in the event loop."""

    def __init__(
        self,
        *,
        model: ServedModel,
        admission: Admission,
        fleet: Fleet,
        queue: RequestQueue,
        dispatch: Dispatch,
        rounds: Rounds,
        metrics: RouterMetrics,
        tracing: Tracing,
        epoch: int,
        max_attempts: int,
        rng: random.Random,
        slow_client_timeout: timedelta = timedelta(minutes=1),
        log_prompts: bool = False,
    ) -> None:
        """slow_client_timeout: longest wait for a client to read. log_prompts: prompts go to the log, and only then."""
        self._model = model
        self._admission = admission
        self._fleet = fleet
        self._queue = queue
        self._dispatch = dispatch
        self._metrics = metrics
        self._tracing = tracing
        self._epoch = epoch
        self._max_attempts = max_attempts
        self._rng = rng
        self._slow_client_timeout = slow_client_timeout
        self._log_prompts = log_prompts
        self._uids = Uids()
        self._rounds = rounds

    @property
    def limits(self) -> Limits:
        """The model's, cut to what every registered worker can hold."""
        return self._model.limits.within(self._fleet.capacity.max_context)

    async def generate(self, pb: generation_pb2.GenerateRequest, write: Write, *, caller: Caller) -> None:
        """Returns after the last Finished was written. Raises the status the call ends with."""
        outcome, journey, about = "OK", None, About(pb.request_id[:MAX_ID_BYTES])
        bind(about)
        self._rounds.call_came()
        trace = RequestTrace(self._tracing, parent=caller.traceparent, arrived_at=caller.arrived_at)
        try:
            self._admission.check_room(priority=pb.priority, tenant=caller.tenant)
            request = validate(pb, self.limits)
            about.request_id = name = request.request_id or f"req-{self._rng.getrandbits(64):016x}"
            await self._admission.left(name, client=caller.client, within_seconds=GOODBYE_SECONDS)
            with self._admission.enter(name, client=caller.client, priority=request.priority, tenant=caller.tenant) as stay:
                n = request.n
                journey = await stay.unless_ended(self._prepare(request, stay, caller, trace))
                del request  # Its list of ids would be the largest thing a long stream holds.
                if journey is None:
                    await _say_aborted(write, name, n=n, arrived_at=caller.arrived_at)
                else:
                    await journey.run(write, on_first_token=stay.started)
        except PdserveError as error:
            outcome = error.status.name
            if journey is None or not journey.is_placed:
                self._metrics.refused(error)
            raise
        except asyncio.CancelledError:
            outcome = "CANCELLED"
            raise
        except Exception:
            outcome = "INTERNAL"
            raise
        finally:
            self._metrics.request_ended(outcome)
            if journey is not None:
                about.uid, about.attempt = journey.uid, journey.last_attempt
            output_tokens = journey.output_tokens if journey is not None else 0
            trace.end(outcome, request_id=about.request_id, output_tokens=output_tokens)

    def abort(self, request_id: str, *, client: str | None) -> bool:
        """client: whose requests may be meant; None: anybody's. False: no running request of theirs has this id."""
        if client is None:
            stays = [stay for stay in self._admission.stays() if stay.request_id == request_id]
        else:
            stays = [stay for stay in [self._admission.find(request_id, client=client)] if stay is not None]
        for stay in stays:
            stay.end(None)
        return bool(stays)

    async def _prepare(self, request: ValidRequest, stay: Stay, caller: Caller, trace: RequestTrace) -> Journey:
        """From a valid request to a journey that can run."""
        prompt = await self._model.read(request.prompt, rule=self.limits.prompt_length)
        check_prompt(prompt, self.limits)
        if self._log_prompts:
            log.info("prompt of %d tokens: %r", len(prompt), request.prompt)
        if self._fleet.capacity.pair_pages is None:
            await self._fleet.until_placeable(ANY)  # Before that nobody knows the pools.
            check_prompt(prompt, self.limits)
        work = self._work(request, stay.request_id, prompt, caller, trace)
        journey = self._journey(request, work, caller.arrived_at)
        stay.attach(journey.end)
        self._metrics.prompt(len(prompt))
        return journey

    def _work(self, request: ValidRequest, request_id: str, prompt: Sequence[int], caller: Caller, trace: RequestTrace) -> Work:
        """Raises OutOfRange for what can never fit."""
        pages, page_size = self._fleet.capacity.pair_pages, self._fleet.capacity.page_size
        assert pages is not None and page_size is not None, "measured before a pair was there"
        sampling = request.sampling
        limit = output_limit(
            prompt_len=len(prompt),
            max_tokens=sampling.max_tokens,
            max_tokens_given=request.max_tokens_given,
            max_context=self.limits.max_context,
            page_size=page_size,
            pool_pages=pages,
        )
        seed = sampling.seed if sampling.seed is not None else self._rng.getrandbits(63)
        return Work(
            router_epoch=self._epoch,
            request_id=request_id,
            prompt=array("i", prompt),
            sampling=replace(sampling, seed=seed, max_tokens=limit, min_tokens=min(sampling.min_tokens, limit)),
            output_limit=limit,
            logprobs=request.logprobs,
            priority=request.priority,
            page_size=page_size,
            deadline=caller.deadline,
            session=caller.session,
            tenant=caller.tenant,
            trace=trace,
        )

    def _journey(self, request: ValidRequest, work: Work, arrived_at: float) -> Journey:
        journey = Journey(
            work.request_id,
            prompt_tokens=len(work.prompt),
            outlet=Outlet(self._rounds),
            stopwatch=Stopwatch(arrived_at=arrived_at, metrics=self._metrics),
            token_bytes=bytes_per_token(request.logprobs),
            slow_client_timeout=self._slow_client_timeout,
        )
        completions = [
            Completion(uid=uid, number=number, output=self._output(request, work.request_id, number), events=journey)
            for number, uid in enumerate(self._uids.take(request.n))
        ]
        attempts = Attempts(
            work,
            completions,
            fleet=self._fleet,
            queue=self._queue,
            dispatch=self._dispatch,
            metrics=self._metrics,
            max_attempts=self._max_attempts,
            on_error=journey.end,
        )
        journey.prepare(completions, attempts)
        return journey

    def _output(self, request: ValidRequest, request_id: str, number: int) -> Output:
        logprobs = request.logprobs is not None
        plain = request.ids_only and not logprobs
        stream = None if plain else TextStream.of(self._model.tokenizer, request)
        return Output(stream, request_id=request_id, number=number, logprobs=logprobs)


async def _say_aborted(write: Write, request_id: str, *, n: int, arrived_at: float) -> None:
    """Of a request that was aborted before it had a journey: nothing of it has been counted."""
    waited_ms = (time.monotonic() - arrived_at) * 1000
    timing = generation_pb2.Timing(queue_ms=waited_ms, ttft_ms=waited_ms, total_ms=waited_ms)
    finished = generation_pb2.Finished(reason=generation_pb2.FINISH_REASON_ABORT, usage=generation_pb2.Usage(), timing=timing)
    for number in range(n):
        await write(generation_pb2.GenerateResponse(request_id=request_id, index=number, finished=finished))
