"""A client of the public API: one call's events collected, each checked against the order the API promises."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from common.rpc.gen.pdserve.v1 import generation_pb2 as pb
from common.rpc.gen.pdserve.v1.generation_pb2_grpc import GenerationServiceStub

CALL_SECONDS = 90.0
"""Far: a near deadline, on a slow machine, is a reason to refuse a request."""
"""Every test call carries a deadline, so that a hang fails the test."""


@dataclass
class Completion:
    """One completion's deltas in order and its end."""

    deltas: list[pb.Delta] = field(default_factory=list)
    finished: pb.Finished | None = None

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def ids(self) -> list[int]:
        return [token for delta in self.deltas for token in delta.token_ids]

    @property
    def logprobs(self) -> list[pb.TokenLogprob]:
        return [entry for delta in self.deltas for entry in delta.logprobs]

    @property
    def end(self) -> pb.Finished:
        assert self.finished is not None, "the call ended OK without a Finished message"
        return self.finished

    @property
    def reason(self) -> str:
        return pb.FinishReason.Name(self.end.reason).removeprefix("FINISH_REASON_")


@dataclass
class Answer:
    """Everything one Generate call said."""

    completions: dict[int, Completion] = field(default_factory=dict)
    started: pb.Started | None = None
    request_id: str = ""

    def add(self, event: pb.GenerateResponse) -> None:
        assert not self.request_id or event.request_id == self.request_id
        self.request_id = event.request_id
        kind = event.WhichOneof("event")
        if kind == "started":
            assert self.started is None and not self.completions and event.index == 0, "Started comes once, first, with index 0"
            self.started = event.started
            return
        assert self.started is not None or (kind == "finished" and event.finished.reason == pb.FINISH_REASON_ABORT)
        completion = self.completions.setdefault(event.index, Completion())
        assert completion.finished is None, f"{kind} after Finished of completion {event.index}"
        if kind == "delta":
            completion.deltas.append(event.delta)
        else:
            completion.finished = event.finished

    @property
    def only(self) -> Completion:
        assert set(self.completions) == {0}
        return self.completions[0]

    @property
    def text(self) -> str:
        return self.only.text

    @property
    def ids(self) -> list[int]:
        return self.only.ids

    @property
    def reason(self) -> str:
        return self.only.reason

    @property
    def usage(self) -> pb.Usage:
        return self.only.end.usage


Prompt = str | Sequence[int] | pb.Chat | None


def request(prompt: Prompt, *, sampling: dict[str, Any] | None = None, **fields: Any) -> pb.GenerateRequest:
    """A GenerateRequest; sampling and fields are named as in generation.proto."""
    made = pb.GenerateRequest(**fields)
    if sampling is not None:
        made.sampling.CopyFrom(pb.SamplingParams(**sampling))
    match prompt:
        case None:
            pass
        case str():
            made.text = prompt
        case pb.Chat():
            made.chat.CopyFrom(prompt)
        case _:
            made.token_ids.CopyFrom(pb.TokenIds(ids=prompt))
    return made


class Client:
    """One channel to a router."""

    def __init__(self, address: str, *, channel: grpc.aio.Channel | None = None) -> None:
        """channel: one to address, made as the caller likes."""
        self.channel = grpc.aio.insecure_channel(address) if channel is None else channel
        self.stub: Any = GenerationServiceStub(self.channel)

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.channel.close(None)

    def call(
        self,
        prompt: Prompt,
        *,
        timeout: float = CALL_SECONDS,
        metadata: dict[str, str] | None = None,
        sampling: dict[str, Any] | None = None,
        **fields: Any,
    ) -> Any:
        """The open stream, for tests that read or cancel it themselves."""
        message = request(prompt, sampling=sampling, **fields)
        return self.stub.Generate(message, timeout=timeout, metadata=tuple((metadata or {}).items()))

    async def generate(
        self, prompt: Prompt, *, timeout: float = CALL_SECONDS, sampling: dict[str, Any] | None = None, **fields: Any
    ) -> Answer:
        """The whole answer; every completion asked for has its Finished. Raises AioRpcError on any other status than OK."""
        answer = Answer()
        async for event in self.call(prompt, timeout=timeout, sampling=sampling, **fields):
            answer.add(event)
        assert set(answer.completions) == set(range(max(1, fields.get("n", 1))))
        for completion in answer.completions.values():
            assert completion.end.usage.completion_tokens == len(completion.ids)
        return answer

    async def refusal(self, prompt: Prompt, **fields: Any) -> tuple[grpc.StatusCode, str]:
        """The status and message of a call that must fail; fails if it does not, or if it streamed anything first."""
        events: list[pb.GenerateResponse] = []
        try:
            async for event in self.call(prompt, **fields):
                events.append(event)
        except grpc.aio.AioRpcError as error:
            assert not events, f"{len(events)} events before {error.code()}"
            return error.code(), error.details() or ""
        raise AssertionError(f"the call ended OK with {len(events)} events")

    async def workers(self) -> dict[str, pb.Worker]:
        """GetCluster's workers that are not gone, by id."""
        response = await self.stub.GetCluster(pb.GetClusterRequest(), timeout=5)
        return {worker.id: worker for worker in response.workers if worker.state not in ("left", "lost")}

    async def model(self) -> pb.GetModelResponse:
        response: pb.GetModelResponse = await self.stub.GetModel(pb.GetModelRequest(), timeout=5)
        return response

    async def flush(self) -> int:
        pages: int = (await self.stub.FlushCache(pb.FlushCacheRequest(), timeout=10)).pages_freed
        return pages


async def first_event(call: AsyncIterator[pb.GenerateResponse], kind: str) -> pb.GenerateResponse:
    """Reads until an event of this kind has come."""
    async for event in call:
        if event.WhichOneof("event") == kind:
            return event
    raise AssertionError(f"the call ended OK before any {kind}")
