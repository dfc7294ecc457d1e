"""Shooter: sends questions at their times to a router and notes, in simulated seconds, when each token came."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import grpc

from bench.serving.records import Record
from bench.serving.shots import Kind
from bench.sim.traffic import Question
from common.rpc.gen.pdserve.v1 import generation_pb2 as pb

GENERATE: Final = "/pdserve.v1.GenerationService/Generate"
SESSION_KEY: Final = "x-session-id"
CALL_SECONDS: Final = 300.0


@dataclass
class Seen:
    """One question's record and what of its prompt was cached. attempts: of its work."""

    record: Record
    cached_tokens: int = 0
    attempts: int = 0


class Shooter:
    """Event loop only. A message's arrival is stamped before it is parsed, and it is parsed after the load."""

    def __init__(self, channel: grpc.aio.Channel, *, time_scale: float, warmup: float) -> None:
        """warmup: simulated seconds at the start that keep the load up and are not measured."""
        self._generate: Any = channel.unary_stream(
            GENERATE,
            request_serializer=lambda request: request,
            response_deserializer=lambda data: (time.monotonic(), data),
        )
        self._time_scale = time_scale
        self._warmup = warmup
        self._start = 0.0

    async def shoot(self, questions: Sequence[Question]) -> list[Seen]:
        requests = [_request(question) for question in questions]
        self._start = time.monotonic() + 0.2
        return await asyncio.gather(*(self._one(*each) for each in zip(questions, requests, strict=True)))

    async def _one(self, question: Question, request: bytes) -> Seen:
        kind: Kind = "warm" if question.at < self._warmup else "measured"
        seen = Seen(Record(kind, question.at, len(question.prompt), question.output_tokens))
        await asyncio.sleep(max(0.0, self._start + question.at / self._time_scale - time.monotonic()))
        seen.record.sent = self._now()
        metadata = ((SESSION_KEY, question.session),) if question.session else None
        stamped: list[tuple[float, bytes]] = []
        try:
            async for message in self._generate(request, timeout=CALL_SECONDS, metadata=metadata):
                stamped.append(message)
        except grpc.aio.AioRpcError as error:
            seen.record.error = error.code().name
        seen.record.ended = self._now()
        self._read(seen, stamped)
        return seen

    def _now(self) -> float:
        return self._simulated(time.monotonic())

    def _simulated(self, at: float) -> float:
        return (at - self._start) * self._time_scale

    def _read(self, seen: Seen, stamped: Sequence[tuple[float, bytes]]) -> None:
        for at, data in stamped:
            event = pb.GenerateResponse.FromString(data)
            if count := len(event.delta.token_ids):
                seen.record.times.append(self._simulated(at))
                seen.record.counts.append(count)
            if event.HasField("finished"):
                seen.cached_tokens = event.finished.usage.cached_tokens
                seen.attempts = event.finished.timing.attempts
        if not seen.record.error and seen.record.tokens != seen.record.asked_tokens:
            seen.record.error = f"{seen.record.tokens} of {seen.record.asked_tokens} tokens"


def _request(question: Question) -> bytes:
    sampling = pb.SamplingParams(max_tokens=question.output_tokens, ignore_eos=True)
    prompt = pb.TokenIds(ids=list(question.prompt))
    return pb.GenerateRequest(token_ids=prompt, sampling=sampling, ids_only=True).SerializeToString()
