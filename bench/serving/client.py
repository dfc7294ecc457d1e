"""One client process: sends its shots at their times, and says what it saw. The other end is bench/serving/clients.py.

    python -m bench.serving.client        stdin: a Job                     stdout: {"ready": ...}
                                          stdin: the start (monotonic s)   stdout: {"records": [...], "health": {...}}

Requests are made before the start. A message's arrival is stamped before it is parsed, and it is parsed after the load, so that
this process's own work is as small a part of the figures as it can be; how late it was all the same, it measures.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

import grpc
import numpy as np
import uvloop

from bench.serving.records import Record
from bench.serving.shots import Shot
from common.errors import StartError
from common.rpc.client_options import ClientOptions
from common.rpc.gen.pdserve.v1 import generation_pb2 as pb
from common.rpc.gen.pdserve.v1.generation_pb2_grpc import GenerationServiceStub

GENERATE = "/pdserve.v1.GenerationService/Generate"
READY_SECONDS = 20.0
LAG_PROBE_SECONDS = 0.01
Stamped = tuple[float, bytes]


@dataclass(frozen=True)
class Job:
    """seed: of the prompts' ids. cut_at: seconds after the start when whatever still runs is ended. timeout: a request's."""

    router: str
    shots: list[Shot]
    seed: int
    cut_at: float | None = None
    timeout: float = 600.0
    temperature: float = 0.0
    top_p: float = 1.0

    @classmethod
    def from_json(cls, text: str) -> Job:
        values = json.loads(text)
        return cls(**(values | {"shots": [Shot(**shot) for shot in values["shots"]]}))

    def to_json(self) -> str:
        return json.dumps(asdict(self))


@dataclass
class Flight:
    """A shot on its way. stamped: each message's arrival (monotonic) and its bytes."""

    record: Record
    request: bytes
    stamped: list[Stamped] = field(default_factory=list)


class Client:
    def __init__(self, job: Job, channel: grpc.aio.Channel) -> None:
        self._job = job
        self._channel = channel
        # Typed in generation_pb2_grpc, but there the message is parsed on arrival.
        self._generate: Any = channel.unary_stream(
            GENERATE,
            request_serializer=lambda request: request,
            response_deserializer=lambda data: (time.monotonic(), data),
        )
        self._flights: list[Flight] = []
        self._start = 0.0
        self._lags: list[float] = []

    async def prepare(self) -> dict[str, Any]:
        """Waits for the router; makes every request. What the router serves."""
        stub: Any = GenerationServiceStub(self._channel)
        model = await stub.GetModel(pb.GetModelRequest(), timeout=READY_SECONDS, wait_for_ready=True)
        rng = np.random.default_rng(self._job.seed)
        self._flights = [Flight(_record(shot), self._request(shot, model.vocab_size, rng)) for shot in self._job.shots]
        return {"model": model.name, "dtype": model.dtype, "max_context": model.max_context}

    def _request(self, shot: Shot, vocab_size: int, rng: np.random.Generator) -> bytes:
        job = self._job
        ids = rng.integers(0, vocab_size, shot.input_tokens).tolist()
        sampling = pb.SamplingParams(max_tokens=shot.output_tokens, ignore_eos=True, temperature=job.temperature, top_p=job.top_p)
        return pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids), sampling=sampling, ids_only=True).SerializeToString()

    async def run(self, start: float) -> None:
        """start: on the monotonic clock, the same for all clients of a machine."""
        self._start = start
        probe = asyncio.create_task(self._probe())
        calls = {asyncio.create_task(self._shoot(flight)): flight.record for flight in self._flights}
        ends = [call for call, record in calls.items() if record.kind in ("measured", "stream")] or list(calls)
        limit = None if self._job.cut_at is None else max(0.0, start + self._job.cut_at - time.monotonic())
        if calls:
            await asyncio.wait(ends, timeout=limit)
        for call in (*calls, probe):
            call.cancel()
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        if broken := [outcome for outcome in outcomes if isinstance(outcome, Exception)]:
            raise broken[0]

    async def _shoot(self, flight: Flight) -> None:
        record = flight.record
        await asyncio.sleep(max(0.0, self._start + record.at - time.monotonic()))
        record.sent = time.monotonic() - self._start
        try:
            async for stamped in self._generate(flight.request, timeout=self._job.timeout):
                flight.stamped.append(stamped)
        except grpc.aio.AioRpcError as error:
            record.error = error.code().name
        except asyncio.CancelledError:
            record.was_cut = True
            if record.kind == "measured":
                record.error = "unfinished"
        record.ended = time.monotonic() - self._start

    async def _probe(self) -> None:
        """How late this event loop runs what is due."""
        while True:
            due = time.monotonic() + LAG_PROBE_SECONDS
            await asyncio.sleep(LAG_PROBE_SECONDS)
            self._lags.append(time.monotonic() - due)

    def result(self, cpu_seconds: float) -> dict[str, Any]:
        for flight in self._flights:
            self._read(flight)
        sent = [flight.record for flight in self._flights if flight.record.ended]
        elapsed = max((record.ended for record in sent), default=0.0)
        health = {
            "lateness": sorted(record.sent - record.at for record in sent),
            "lags": sorted(self._lags),
            "cpu_share": cpu_seconds / elapsed if elapsed else 0.0,
        }
        return {"records": [record.as_dict() for record in sent], "health": health}

    def _read(self, flight: Flight) -> None:
        for at, data in flight.stamped:
            event = pb.GenerateResponse.FromString(data)
            if count := len(event.delta.token_ids):
                flight.record.times.append(at - self._start)
                flight.record.counts.append(count)
        if not (flight.record.error or flight.record.was_cut) and flight.record.tokens != flight.record.asked_tokens:
            flight.record.error = f"{flight.record.tokens} of {flight.record.asked_tokens} tokens"


def _record(shot: Shot) -> Record:
    return Record(shot.kind, shot.at, shot.input_tokens, shot.output_tokens)


def _say(value: Any) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


async def main() -> None:
    job = Job.from_json(sys.stdin.readline())
    try:
        # The parent has no need of them, so they come past it.
        connecting = ClientOptions.from_environment().connect(job.router, silence=timedelta(seconds=60))
    except (StartError, ValueError) as error:
        sys.exit(f"error: {error}")
    async with connecting as channel:
        client = Client(job, channel)
        try:
            _say({"ready": await client.prepare()})
        except grpc.aio.AioRpcError as error:
            sys.exit(f"error: no router answers on {job.router}: {error.code().name}")
        start = float(sys.stdin.readline())
        cpu = time.process_time()
        await client.run(start)
        cpu = time.process_time() - cpu
    _say(client.result(cpu))


if __name__ == "__main__":
    uvloop.run(main())
