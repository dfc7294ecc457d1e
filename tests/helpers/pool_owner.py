"""PoolOwner: a second process that owns a pool of pages and takes them by shm and by grpc, to test senders against.

It is written from common/handoff/base.py and handoff.proto alone. `python -m tests.helpers.pool_owner` prints one JSON line with
where it is reached, then the pool's bytes in hexadecimal for each line it reads.
"""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import secrets
import socket
import subprocess
import sys
import threading
import zlib
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any

import grpc

from common.handoff.base import page_range, parse_hello, send_welcome
from common.rpc.gen.pdserve.v1 import handoff_pb2, handoff_pb2_grpc


class PoolOwner:
    """The parent's side. Every page is zero at first; grpc tickets are "page_id,page_id,..."."""

    def __init__(self, *, num_pages: int, page_bytes: int) -> None:
        args = [sys.executable, "-m", "tests.helpers.pool_owner", str(num_pages), str(page_bytes)]
        self._page_bytes = page_bytes
        self._process = subprocess.Popen(args, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        where = json.loads(self._read())
        self.shm_socket: str = where["shm_socket"]
        self.pair_id: str = where["pair_id"]
        self.grpc_address: str = where["grpc_address"]

    def __enter__(self) -> PoolOwner:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.kill()

    def pages(self) -> list[bytes]:
        """What the pool holds now."""
        assert self._process.stdin is not None
        self._process.stdin.write("dump\n")
        self._process.stdin.flush()
        data = bytes.fromhex(self._read())
        return [data[start : start + self._page_bytes] for start in range(0, len(data), self._page_bytes)]

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()


class _Receiver(handoff_pb2_grpc.HandoffServiceServicer):
    def __init__(self, pool: memoryview, page_bytes: int) -> None:
        self._pool = pool
        self._page_bytes = page_bytes

    async def Push(self, frames: AsyncIterator[handoff_pb2.KvFrame], context: Any) -> handoff_pb2.PushResponse:
        received = 0
        async for frame in frames:
            assert zlib.crc32(frame.data) == frame.crc32 and len(frame.data) <= 1 << 20
            page_ids = [int(page) for page in frame.ticket.split(",")]
            page = self._pool[page_range(page_ids[frame.page_index], self._page_bytes)]
            page[frame.offset : frame.offset + len(frame.data)] = frame.data
            received += len(frame.data)
        return handoff_pb2.PushResponse(bytes_received=received)


def _serve_shm(listener: socket.socket, pair_id: str, pool_fd: int, pool_bytes: int) -> None:
    open_connections = []
    while True:
        connection, _ = listener.accept()
        line = b""
        while (more := connection.recv(200)) and parse_hello(line + more) is None:
            line += more
        if parse_hello(line + more) == pair_id:
            send_welcome(connection, descriptor=pool_fd, pool_bytes=pool_bytes)
            open_connections.append(connection)
        else:
            connection.close()


async def _main(num_pages: int, page_bytes: int) -> None:
    pool_fd = os.memfd_create("pool", os.MFD_CLOEXEC)
    os.ftruncate(pool_fd, num_pages * page_bytes)
    pool = memoryview(mmap.mmap(pool_fd, num_pages * page_bytes))
    name, pair_id = f"pdserve-test-{secrets.token_hex(8)}", secrets.token_hex(8)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(b"\0" + name.encode())
    listener.listen()
    threading.Thread(target=_serve_shm, args=(listener, pair_id, pool_fd, len(pool)), daemon=True).start()
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", 8 << 20)])
    handoff_pb2_grpc.add_HandoffServiceServicer_to_server(_Receiver(pool, page_bytes), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    print(json.dumps({"shm_socket": name, "pair_id": pair_id, "grpc_address": address}), flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        print(bytes(pool).hex(), flush=True)


if __name__ == "__main__":
    asyncio.run(_main(int(sys.argv[1]), int(sys.argv[2])))
