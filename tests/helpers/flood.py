"""Thousands of calls at once from one process, with as little of its own work per call as a client can have."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import grpc

from common.rpc.gen.pdserve.v1 import generation_pb2 as pb
from common.rpc.gen.pdserve.v1.generation_pb2_grpc import GenerationServiceStub


@dataclass
class Flood:
    """errors: of calls that did not end OK, each with the seconds from its start to its end. served: how many ended OK."""

    errors: list[tuple[grpc.RpcError, float]] = field(default_factory=list)
    served: int = 0


def flood(address: str, requests: Sequence[pb.GenerateRequest], *, channels: int, timeout: float) -> Flood:
    """Starts one call per request, in turn over so many channels, and returns when all have ended. Blocks: give it a thread."""
    result, ends = Flood(), [0.0] * len(requests)
    # Each with a connection of its own: channels to one address would share one.
    made = [grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) for _ in range(channels)]
    for channel in made:
        grpc.channel_ready_future(channel).result(timeout=10)
    stubs = [GenerationServiceStub(channel) for channel in made]
    calls, begins = [], []
    for i, request in enumerate(requests):
        begins.append(time.monotonic())
        call = stubs[i % channels].Generate(request, timeout=timeout)
        call.add_done_callback(lambda _, i=i: ends.__setitem__(i, time.monotonic()))
        calls.append(call)
    for i, call in enumerate(calls):
        try:
            for _ in call:
                pass
            result.served += 1
        except grpc.RpcError as error:
            result.errors.append((error, (ends[i] or time.monotonic()) - begins[i]))
    for channel in made:
        channel.close()
    return result
