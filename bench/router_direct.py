"""The baseline of bench/router.py: the same streams straight from the worker's process, as lean as grpc.aio allows.

Every stream is a call of its own, as through the router, and a step wakes all of them at one instant. Each then writes its
delta: no text is made, nothing is ordered, held back or counted.
"""

from __future__ import annotations

import asyncio
from typing import Any

from bench.steps import Steps
from common.rpc.gen.pdserve.v1 import generation_pb2, generation_pb2_grpc


class Direct(generation_pb2_grpc.GenerationServiceServicer):
    """For clients that read to the end: all streams wait for one future, so a cancelled one would take the others along."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._streams = 0
        self._next = _Step()
        self._emitter: asyncio.Task[None] | None = None

    async def Generate(self, request: generation_pb2.GenerateRequest, context: Any) -> None:
        self._streams += 1
        if self._emitter is None:
            self._emitter = asyncio.create_task(self._emit())
        response = generation_pb2.GenerateResponse(request_id=f"req-{id(context):016x}")
        response.delta.token_ids.append(0)
        response.delta.text = "x"
        step = self._next
        for _ in range(request.sampling.max_tokens):
            response.delta.token_ids[0], step = await step.happened
            await context.write(response)
        self._streams -= 1

    async def _emit(self) -> None:
        self._steps.begin()
        while self._streams:
            await self._steps.due()
            step, self._next = self._next, _Step()
            step.happened.set_result((self._steps.stamp(), self._next))
        self._emitter = None


class _Step:
    """happened: the id of its tokens, and the step after it, so that a stream that is late misses none."""

    def __init__(self) -> None:
        self.happened: asyncio.Future[tuple[int, _Step]] = asyncio.get_running_loop().create_future()
