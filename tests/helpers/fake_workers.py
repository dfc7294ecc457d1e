"""Prefill and decode workers without an engine, for the router's tests: real servers that register and speak Sessions.

The next token is a function of the whole history, so that a lost or doubled token shows. KV does not exist: the fake prefill
worker hands a request over by a plain call to the fake decode worker at the address the router chose.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from common.address import Address
from common.core import WorkKey
from common.rpc.gen.pdserve.v1 import decode_pb2, decode_pb2_grpc, generation_pb2, prefill_pb2, prefill_pb2_grpc, work_pb2
from common.rpc.registration import Registration
from common.rpc.server import bind, make_server
from common.wire import ids_from_bytes, ids_to_bytes, key_from_pb
from common.work import Compatibility, PageCounts, Role, WorkerLoad, WorkerProfile

LETTERS = 94
"""Fake tokens are in [0, LETTERS): printable one-character tokens of the byte-level test models."""


def next_token(ids: Sequence[int], completion: int = 0) -> int:
    return zlib.crc32(ids_to_bytes(ids), completion) % LETTERS


def expected_output(prompt: Sequence[int], count: int, completion: int = 0) -> list[int]:
    """The first count tokens after prompt."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(next_token(ids, completion))
    return ids[len(prompt) :]


@dataclass
class FakeRequest:
    """One completion on a fake worker."""

    key: WorkKey
    ids: list[int]
    prompt_len: int
    left: int
    completion: int
    sampling: generation_pb2.SamplingParams
    logprobs: bool
    is_new: bool = True

    @classmethod
    def all_of(cls, req: work_pb2.Req) -> list[FakeRequest]:
        key = key_from_pb(req.key)
        return [
            cls(
                key=key.for_completion(i),
                ids=list(ids_from_bytes(req.input_ids)),
                prompt_len=req.prompt_len,
                left=req.output_len,
                completion=req.completion + i,
                sampling=req.sampling,
                logprobs=req.HasField("logprobs"),
            )
            for i in range(max(1, req.n))
        ]

    def make_token(self) -> work_pb2.Token:
        token_id = next_token(self.ids, self.completion)
        index = len(self.ids) - self.prompt_len
        self.ids.append(token_id)
        self.left -= 1
        token = work_pb2.Token(uid=self.key.uid, attempt=self.key.attempt, index=index, token_id=token_id)
        if self.logprobs:
            token.logprob = -token_id / 100
            token.top_ids.extend([token_id, (token_id + 1) % LETTERS])
            token.top_logprobs.extend([-token_id / 100, -2.0])
        if token_id in self.sampling.stop_token_ids:
            token.finish = generation_pb2.FINISH_REASON_STOP
        elif self.left == 0:
            token.finish = generation_pb2.FINISH_REASON_LENGTH
        return token


class FakeWorker:
    """What both roles share: a server, a registration, one outgoing queue per session."""

    role: Role
    _all: dict[str, FakeWorker] = {}

    def __init__(self, router: str, compatibility: Compatibility, *, worker_id: str, total_pages: int = 1000) -> None:
        self.worker_id = worker_id
        self.address = ""
        self.load = WorkerLoad(pages=PageCounts(total_pages, 0, 0, 0, total_pages))
        self.cancels: list[tuple[int, int]] = []
        self.flushes = 0
        self.sessions_opened = 0
        self._router = Address.parse(router)
        self._compatibility = compatibility
        self._total_pages = total_pages
        self._sessions: dict[int, asyncio.Queue[Any]] = {}
        self._calls: list[Any] = []
        self._server = make_server()
        self._registration: asyncio.Task[None] | None = None
        self.standing: Registration

    async def start(self, *, listen: str = "127.0.0.1:0") -> None:
        self._add_services(self._server)
        self.address = str(await bind(self._server, Address.parse(listen)))
        await self._server.start()
        FakeWorker._all[self.address] = self
        self.register()

    def register(self) -> None:
        profile = WorkerProfile(
            self.worker_id, self.role, self.address, self._compatibility, "cpu", self._total_pages, max_running=256, version="0"
        )
        self.standing = Registration(routers=[self._router], profile=profile, load=lambda: self.load, on_drain=lambda grace: None)
        self._registration = asyncio.create_task(self.standing.run())

    async def unregister(self) -> None:
        if self._registration is not None:
            self._registration.cancel()
            await asyncio.gather(self._registration, return_exceptions=True)

    async def close(self) -> None:
        """As sudden as a kill: registration, sessions and server end without a word."""
        await self.unregister()
        FakeWorker._all.pop(self.address, None)
        await self._server.stop(0)

    def break_sessions(self) -> None:
        """Ends every session; the router opens new ones."""
        for queue in self._sessions.values():
            queue.put_nowait(None)

    def send(self, epoch: int, **message: Any) -> None:
        """Dropped without a session."""
        if (queue := self._sessions.get(epoch)) is not None:
            queue.put_nowait(self._response(**message))

    async def serve_session(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        hello = await context.read()
        epoch = hello.hello.router_epoch
        queue: asyncio.Queue[Any] = asyncio.Queue()
        self._sessions[epoch] = queue
        self.sessions_opened += 1
        await context.write(self._response(opened=prefill_pb2.SessionOpened(worker_id=self.worker_id)))
        reader = asyncio.create_task(self._read(epoch, context, queue))
        try:
            while (message := await queue.get()) is not None:
                await context.write(message)
        finally:
            reader.cancel()
            if self._sessions.get(epoch) is queue:
                del self._sessions[epoch]
            self.session_closed(epoch)

    async def _read(self, epoch: int, context: grpc.aio.ServicerContext[Any, Any], queue: asyncio.Queue[Any]) -> None:
        while (message := await context.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]
            if message.HasField("cancel"):
                self.cancels.append((message.cancel.uid, message.cancel.attempt))
                self.cancelled(epoch, message.cancel)
            else:
                self.submitted(message.submit)
        queue.put_nowait(None)

    def _add_services(self, server: grpc.aio.Server) -> None:
        raise NotImplementedError

    def _response(self, **message: Any) -> Any:
        raise NotImplementedError

    def submitted(self, submit: prefill_pb2.Submit) -> None:
        raise NotImplementedError

    def cancelled(self, epoch: int, cancel: prefill_pb2.CancelWork) -> None:
        raise NotImplementedError

    def session_closed(self, epoch: int) -> None:
        raise NotImplementedError


class FakePrefill(FakeWorker):
    """gate: closed (cleared), requests wait before their first token. fail_next: (code, message, retryable) for the next ones."""

    role: Role = "prefill"

    def __init__(self, *args: Any, cached_tokens: int = 0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.submits: list[prefill_pb2.Submit] = []
        self.fail_next: list[tuple[int, str, bool]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.hold_commit = asyncio.Event()
        self.hold_commit.set()
        self._cached_tokens = cached_tokens
        self._tasks: dict[tuple[int, int, int], asyncio.Task[None]] = {}

    @property
    def is_idle(self) -> bool:
        return not self._tasks

    def submitted(self, submit: prefill_pb2.Submit) -> None:
        self.submits.append(submit)
        key = key_from_pb(submit.req.key)
        task = self._tasks[key] = asyncio.create_task(self._prefill(submit, key))
        task.add_done_callback(lambda _: self._tasks.pop(key, None))

    def cancelled(self, epoch: int, cancel: prefill_pb2.CancelWork) -> None:
        if (task := self._tasks.get((epoch, cancel.uid, cancel.attempt))) is not None:
            task.cancel()

    def session_closed(self, epoch: int) -> None:
        for key, task in list(self._tasks.items()):
            if key[0] == epoch:
                task.cancel()

    async def _prefill(self, submit: prefill_pb2.Submit, key: WorkKey) -> None:
        epoch = key.router_epoch
        if self.fail_next:
            code, message, retryable = self.fail_next.pop(0)
            failure = work_pb2.Failure(uid=key.uid, attempt=key.attempt, code=code, message=message, retryable=retryable)
            self.send(epoch, failure=failure)
            return
        cached = min(self._cached_tokens, submit.req.prompt_len - 1)
        self.send(epoch, started=prefill_pb2.PrefillStarted(uid=key.uid, attempt=key.attempt, cached_tokens=cached))
        await self.gate.wait()
        requests = FakeRequest.all_of(submit.req)
        first = [request.make_token() for request in requests]
        for token in first:
            self.send(epoch, first_token=token)
        await self.hold_commit.wait()
        running = [(request, token) for request, token in zip(requests, first, strict=True) if not token.finish]
        if not running:
            return
        decode = FakeWorker._all.get(submit.decode_address)
        if not isinstance(decode, FakeDecode) or not decode.commit(running):
            text = f"decode worker {submit.decode_worker} cannot be reached"
            code = grpc.StatusCode.UNAVAILABLE.value[0]
            failure = work_pb2.Failure(uid=key.uid, attempt=key.attempt, code=code, message=text, retryable=True)
            self.send(epoch, failure=failure)
            return
        for request, _ in running:
            self.send(epoch, handed_off=prefill_pb2.HandedOff(uid=request.key.uid, attempt=key.attempt))

    def _response(self, **message: Any) -> Any:
        return prefill_pb2.PrefillSessionResponse(**message)

    def _add_services(self, server: grpc.aio.Server) -> None:
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server(_PrefillServicer(self), server)


@dataclass
class Steps:
    """How a fake decode worker emits."""

    seconds: float = 0.001
    duplicate: bool = False
    reverse: bool = False
    gate: asyncio.Event = field(default_factory=asyncio.Event)


class FakeDecode(FakeWorker):
    """steps.gate: closed (cleared), nothing is decoded. retract_at, die_at: output indices at which a request is handed back
    (once) or the sessions break (once)."""

    role: Role = "decode"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.steps = Steps()
        self.steps.gate.set()
        self.retract_at: set[int] = set()
        self.die_at: set[int] = set()
        self.running: dict[tuple[int, int, int], tuple[FakeRequest, work_pb2.Token]] = {}
        self._loop_task: asyncio.Task[None] | None = None

    @property
    def is_idle(self) -> bool:
        return not self.running

    async def start(self, *, listen: str = "127.0.0.1:0") -> None:
        await super().start(listen=listen)
        self._loop_task = asyncio.create_task(self._loop())

    async def close(self) -> None:
        if self._loop_task is not None:
            self._loop_task.cancel()
        await super().close()

    def commit(self, requests: list[tuple[FakeRequest, work_pb2.Token]]) -> bool:
        """False: this router holds no session here."""
        if requests[0][0].key.router_epoch not in self._sessions:
            return False
        for request, first in requests:
            if (request.key.uid, request.key.attempt) not in self.cancels:
                self.running[request.key] = request, first
        return True

    def submitted(self, submit: prefill_pb2.Submit) -> None:
        raise AssertionError("a decode worker takes no submissions")

    def cancelled(self, epoch: int, cancel: prefill_pb2.CancelWork) -> None:
        self.running.pop((epoch, cancel.uid, cancel.attempt), None)

    def session_closed(self, epoch: int) -> None:
        self.running = {key: value for key, value in self.running.items() if key[0] != epoch}

    async def _loop(self) -> None:
        while True:
            await asyncio.sleep(self.steps.seconds)
            await self.steps.gate.wait()
            for epoch in list(self._sessions):
                self._step(epoch)

    def _step(self, epoch: int) -> None:
        tokens: list[work_pb2.Token] = []
        for key, (request, first) in list(self.running.items()):
            if key[0] == epoch and not self._interrupted(request):
                tokens += self._tokens_of(request, first)
                if tokens[-1].finish:
                    self.running.pop(key, None)
        if tokens:
            if self.steps.duplicate:
                tokens = [token for token in tokens for _ in range(2)]
            self.send(epoch, step=decode_pb2.Step(tokens=reversed(tokens) if self.steps.reverse else tokens))

    def _tokens_of(self, request: FakeRequest, first: work_pb2.Token) -> list[work_pb2.Token]:
        repeated = [first] if request.is_new else []
        request.is_new = False
        count = min(2 if self.steps.reverse else 1, request.left)
        made: list[work_pb2.Token] = []
        while len(made) < count and not (made and made[-1].finish):
            made.append(request.make_token())
        return [*repeated, *made]

    def _interrupted(self, request: FakeRequest) -> bool:
        index = len(request.ids) - request.prompt_len
        if index in self.retract_at:
            self.retract_at.discard(index)
            self.running.pop(request.key, None)
            retracted = decode_pb2.Retracted(uid=request.key.uid, attempt=request.key.attempt)
            self.send(request.key.router_epoch, retracted=retracted)
            return True
        if index in self.die_at:
            self.die_at.discard(index)
            self.break_sessions()
            return True
        return False

    def _response(self, **message: Any) -> Any:
        return decode_pb2.DecodeSessionResponse(**message)

    def _add_services(self, server: grpc.aio.Server) -> None:
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(_DecodeServicer(self), server)


class _PrefillServicer(prefill_pb2_grpc.PrefillServiceServicer):
    def __init__(self, worker: FakePrefill) -> None:
        self._worker = worker

    async def Session(self, request_iterator: Any, context: Any) -> None:
        await self._worker.serve_session(context)

    async def FlushPrefixCache(self, request: Any, context: Any) -> prefill_pb2.FlushPrefixCacheResponse:
        self._worker.flushes += 1
        return prefill_pb2.FlushPrefixCacheResponse(pages_freed=3)


class _DecodeServicer(decode_pb2_grpc.DecodeServiceServicer):
    def __init__(self, worker: FakeDecode) -> None:
        self._worker = worker

    async def Session(self, request_iterator: Any, context: Any) -> None:
        await self._worker.serve_session(context)

    async def FlushPrefixCache(self, request: Any, context: Any) -> prefill_pb2.FlushPrefixCacheResponse:
        self._worker.flushes += 1
        return prefill_pb2.FlushPrefixCacheResponse(pages_freed=4)
