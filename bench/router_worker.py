"""The fake workers of bench/router.py, in a process of their own: prefill takes no time, decode emits steps as told.

    python -m bench.router_worker --router ADDR --direct ADDR --fingerprint HEX --times FILE [--rate TOKENS_PER_SECOND]
        [--workers N] [--deaf]

At --direct the same process serves clients itself (bench/router_direct.py): what a stream costs without a router.
Every token's id is the number of the step that made it, modulo IDS; FILE holds the time of each such step, so that a client
on the same machine can tell a token's age.
"""

from __future__ import annotations

import argparse
import asyncio
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import uvloop

from bench.router_direct import Direct
from bench.steps import IDS, Steps
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
    """The running requests: one Token message each, advanced and sent again with every step."""

    def __init__(self, steps: Steps) -> None:
        self.running: dict[int, tuple[work_pb2.Token, int]] = {}
        self._steps = steps
        self._begun = asyncio.Event()

    def add(self, req: work_pb2.Req) -> None:
        self.running[req.key.uid] = work_pb2.Token(uid=req.key.uid, attempt=req.key.attempt), req.output_len
        self._begun.set()

    def cancel(self, uid: int) -> None:
        self.running.pop(uid, None)

    async def next_step(self) -> decode_pb2.DecodeSessionResponse:
        while not self.running:
            self._begun.clear()
            await self._begun.wait()
        slot = await self._steps.next(tokens=len(self.running))
        tokens = []
        for uid, (token, length) in list(self.running.items()):
            token.index += 1
            token.token_id = slot
            if token.index + 1 == length:
                token.finish = generation_pb2.FINISH_REASON_LENGTH
                del self.running[uid]
            tokens.append(token)
        self._steps.stamp()
        return decode_pb2.DecodeSessionResponse(step=decode_pb2.Step(tokens=tokens))


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
        reader = asyncio.create_task(self._read(request_iterator))
        try:
            while True:
                await context.write(await self._decoder.next_step())
        finally:
            reader.cancel()

    async def _read(self, requests: Any) -> None:
        async for message in requests:
            if message.HasField("cancel"):
                self._decoder.cancel(message.cancel.uid)


async def main(router: str, direct: str, fingerprint: str, steps: Steps, *, workers: int, is_deaf: bool) -> None:
    """workers: prefill workers and as many decode workers. is_deaf: see Prefill."""
    same = Compatibility(fingerprint, "float32", 16, 4096, 2, 2, 16)
    load = WorkerLoad(pages=PageCounts(TOTAL_PAGES, 0, 0, 0, TOTAL_PAGES))
    roles: list[tuple[str, Role, Any, Any]] = []
    decoders = {f"d{number}": Decoder(steps) for number in range(workers)}
    for name, decoder in decoders.items():
        roles.append((name, "decode", decode_pb2_grpc.add_DecodeServiceServicer_to_server, Decode(name, decoder)))
        name = f"p{name[1:]}"
        prefill = Prefill(name, decoders, is_deaf=is_deaf)
        roles.append((name, "prefill", prefill_pb2_grpc.add_PrefillServiceServicer_to_server, prefill))
    server = make_server()
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(Direct(steps), server)
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
    parser.add_argument("--times", type=Path, required=True)
    parser.add_argument("--rate", type=float, default=0.0)
    parser.add_argument("--workers", type=int, default=1, help="prefill workers, and as many decode workers")
    parser.add_argument("--deaf", action="store_true", help="prefill workers take requests and never begin")
    args = parser.parse_args()
    with args.times.open("r+b") as file, mmap.mmap(file.fileno(), IDS * 8) as shared:
        uvloop.run(
            main(
                args.router,
                args.direct,
                args.fingerprint,
                Steps(memoryview(shared).cast("d"), rate=args.rate),
                workers=args.workers,
                is_deaf=args.deaf,
            )
        )
