"""A fake prefill and a fake decode worker for the router's tests.

KV does not exist: the prefill worker hands a request over by a plain call to the fake decode worker at the address the router
chose.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import Any

import grpc

from common.rpc.gen.pdserve.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc, work_pb2
from common.wire import key_from_pb
from common.work import Role, WorkerLoad
from common.work_key import WorkKey
from tests.helpers.fake_request import FakeRequest
from tests.helpers.fake_worker import FakeWorker


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
        self._group_size: dict[tuple[int, int, int], int] = {}
        self._tokens: dict[tuple[int, int, int], int] = {}

    def is_idle(self) -> bool:
        return not self._tasks

    def report(self) -> WorkerLoad:
        return replace(self.load, queued_tokens=self.load.queued_tokens + sum(self._tokens[key] for key in self._tasks))

    def submitted(self, submit: prefill_pb2.Submit) -> None:
        self.submits.append(submit)
        key = key_from_pb(submit.req.key)
        self._tokens[key] = len(submit.req.input_ids) // 4
        self._group_size[key] = max(1, submit.req.n)
        task = self._tasks[key] = asyncio.create_task(self._prefill(submit, key))
        task.add_done_callback(lambda _: self._tasks.pop(key, None))

    def cancelled(self, epoch: int, cancel: prefill_pb2.CancelWork) -> None:
        """One of a group's completions ends nothing, the last one ends the group."""
        for key, task in self._tasks.items():
            uids = range(key[1], key[1] + self._group_size[key])
            if key[2] == cancel.attempt and all((uid, key[2]) in self.cancels for uid in uids):
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
        decode = self.at(submit.decode_address)
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

    def inquired(self, epoch: int, inquire: decode_pb2.Inquire) -> None:
        committed = (epoch, inquire.uid, inquire.attempt) in self.running
        self.send(epoch, holding=decode_pb2.Holding(uid=inquire.uid, attempt=inquire.attempt, committed=committed))

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
