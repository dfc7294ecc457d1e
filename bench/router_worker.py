"""The fake workers of bench/router.py, in a process of their own: prefill takes no time, decode emits steps as told.

    python -m bench.router_worker --router ADDR --direct ADDR --fingerprint HEX [--gap SECONDS] [--tick SECONDS]
        [--workers N] [--deaf]

At --direct the same process serves clients itself (bench/router_direct.py): what a stream costs without a router.
Every token's id tells when its step was made (bench/steps.py), so that a client on the same machine knows its age.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Mapping
from typing import Any

import uvloop

from bench.router_direct import Direct
from bench.steps import Steps
from common.address import Address
from common.rpc.gen.pdserve.v1 import (
    decode_pb2,
    decode_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    work_pb2,
)
from common.rpc.registration import Registration
from common.rpc.server import bind, make_server
from common.work import Compatibility, PageCounts, Role, WorkerLoad, WorkerProfile

TOTAL_PAGES = 1 << 20


class Decoder:
    """The running requests: one Token message each, advanced with every step and sent again. Steps that are due while one is
    being written become one message, as in decode_worker/outbox.py."""

    def __init__(self, steps: Steps) -> None:
        self._running: dict[int, tuple[work_pb2.Token, int]] = {}
        self._steps = steps
        self._unsent = decode_pb2.Step()
        self._is_running, self._has_unsent, self._has_none_unsent = asyncio.Event(), asyncio.Event(), asyncio.Event()

    def add(self, req: work_pb2.Req) -> None:
        self._running[req.key.uid] = work_pb2.Token(uid=req.key.uid, attempt=req.key.attempt), req.output_len
        if not self._is_running.is_set():
            self._steps.begin()
            self._is_running.set()

    def cancel(self, uid: int) -> None:
        self._running.pop(uid, None)

    async def run(self) -> None:
        """Steps for as long as anything runs: as they are due, or without a pace once the last has been taken."""
        while True:
            await self._is_running.wait()
            await self._steps.due()
            if not self._steps.is_paced:
                await self._has_none_unsent.wait()
            self._step(self._steps.stamp())
            if not self._running:
                self._is_running.clear()

    def _step(self, token_id: int) -> None:
        for uid, (token, length) in list(self._running.items()):
            token.index += 1
            token.token_id = token_id
            if token.index + 1 == length:
                token.finish = generation_pb2.FINISH_REASON_LENGTH
                del self._running[uid]
            self._unsent.tokens.append(token)
        self._has_unsent.set()
        self._has_none_unsent.clear()

    async def take(self) -> decode_pb2.DecodeSessionResponse:
        """Waits for tokens: all that are unsent."""
        self._has_none_unsent.set()
        await self._has_unsent.wait()
        self._has_unsent.clear()
        taken, self._unsent = self._unsent, decode_pb2.Step()
        return decode_pb2.DecodeSessionResponse(step=taken)


class Prefill(prefill_pb2_grpc.PrefillServiceServicer):
    """Hands each prompt to the decode worker that the router chose; a deaf one takes them and never begins."""

    def __init__(self, worker_id: str, decoders: Mapping[str, Decoder], *, is_deaf: bool) -> None:
        self._worker_id = worker_id
        self._decoders = decoders
        self._is_deaf = is_deaf

    async def Session(self, request_iterator: Any, context: Any) -> None:
        await context.write(prefill_pb2.PrefillSessionResponse(opened=prefill_pb2.SessionOpened(worker_id=self._worker_id)))
        async for message in request_iterator:
            if message.HasField("submit") and not self._is_deaf:
                key = message.submit.req.key
                first = work_pb2.Token(uid=key.uid, attempt=key.attempt, index=0)
                if is_only := message.submit.req.output_len == 1:
                    first.finish = generation_pb2.FINISH_REASON_LENGTH
                await context.write(prefill_pb2.PrefillSessionResponse(first_token=first))
                if not is_only:
                    self._decoders[message.submit.decode_worker].add(message.submit.req)


class Decode(decode_pb2_grpc.DecodeServiceServicer):
    def __init__(self, worker_id: str, decoder: Decoder) -> None:
        self._worker_id = worker_id
        self._decoder = decoder

    async def Session(self, request_iterator: Any, context: Any) -> None:
        await context.write(decode_pb2.DecodeSessionResponse(opened=prefill_pb2.SessionOpened(worker_id=self._worker_id)))
        sides = [asyncio.create_task(self._read(request_iterator)), asyncio.create_task(self._decoder.run())]
        try:
            while True:
                await context.write(await self._decoder.take())
        finally:
            for side in sides:
                side.cancel()

    async def _read(self, requests: Any) -> None:
        async for message in requests:
            if message.HasField("cancel"):
                self._decoder.cancel(message.cancel.uid)


async def main(router: str, direct: str, fingerprint: str, *, gap: float, tick: float, workers: int, is_deaf: bool) -> None:
    """gap, tick: of each worker's Steps and Direct's. workers: prefill workers, and as many decode workers. is_deaf: see
    Prefill."""
    same = Compatibility(fingerprint, "float32", 16, 4096, 2, 2, 16)
    load = WorkerLoad(pages=PageCounts(TOTAL_PAGES, 0, 0, 0, TOTAL_PAGES))
    roles: list[tuple[str, Role, Any, Any]] = []
    decoders = {f"d{number}": Decoder(Steps(gap=gap, tick=tick)) for number in range(workers)}
    for name, decoder in decoders.items():
        roles.append((name, "decode", decode_pb2_grpc.add_DecodeServiceServicer_to_server, Decode(name, decoder)))
        name = f"p{name[1:]}"
        prefill = Prefill(name, decoders, is_deaf=is_deaf)
        roles.append((name, "prefill", prefill_pb2_grpc.add_PrefillServiceServicer_to_server, prefill))
    server = make_server()
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(Direct(Steps(gap=gap, tick=tick)), server)
    await bind(server, Address.parse(direct))
    await server.start()
    servers, registrations = [server], []
    for worker_id, role, add, servicer in roles:
        server = make_server()
        add(servicer, server)
        address = await bind(server, Address("127.0.0.1", 0))
        await server.start()
        servers.append(server)  # One that nobody holds stops.
        profile = WorkerProfile(worker_id, role, str(address), same, "cpu", TOTAL_PAGES, 1024, "bench")
        registration = Registration(
            routers=[Address.parse(router)], profile=profile, load=lambda: load, on_drain=lambda grace, stay: None
        )
        registrations.append(registration.run())
    await asyncio.gather(*registrations)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--router", required=True)
    parser.add_argument("--direct", required=True)
    parser.add_argument("--fingerprint", required=True)
    parser.add_argument("--gap", type=float, default=0.0, help="seconds between a worker's steps; 0: as fast as they are taken")
    parser.add_argument("--tick", type=float, default=0.001, help="seconds: the accuracy of a token's age")
    parser.add_argument("--workers", type=int, default=1, help="prefill workers, and as many decode workers")
    parser.add_argument("--deaf", action="store_true", help="prefill workers take requests and never begin")
    args = parser.parse_args()
    uvloop.run(
        main(
            args.router,
            args.direct,
            args.fingerprint,
            gap=args.gap,
            tick=args.tick,
            workers=args.workers,
            is_deaf=args.deaf,
        )
    )
