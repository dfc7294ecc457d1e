"""A prefill worker's engine process, reduced to its mapping of a decode worker's GPU memory (which is FakeCuda's).

python -m tests.helpers.cuda_writer EXPORT SOCKET PAIR_ID    EXPORT: as_argument(...). Prints "mapped" or "refused: ..."
stdin: pages PAGE_BYTES 3 5 ...    from now on fills these pages with changing bytes, one after the other; prints "writing"
stdin: fill PAGE_BYTES PAGE HEX    writes one page once, prints "filled"
stdin: stop                        writes no more, prints "stopped"
stdin: send HEX                    sends these bytes on the line to the decode worker's engine as they are, prints "sent"
stdin: commit HEX                  sends this CommitRequest ahead, said to be computed now, prints "sent"
stdin: hang up                     closes the socket and nothing else, prints "hung up"
stdin: close                       as a link is closed in good order, prints "closed"
"""

from __future__ import annotations

import json
import queue
import sys
import threading
import time
from dataclasses import asdict
from typing import Any

from common.errors import FailedPrecondition
from common.handoff.base import page_range
from common.handoff.cuda_ipc import PoolExport
from common.handoff.cuda_ipc_link import CudaIpcLink
from common.rpc.gen.pdserve.v1 import decode_pb2
from tests.helpers.fake_cuda import FakeCuda


def as_argument(export: PoolExport) -> str:
    return json.dumps({name: value.hex() if isinstance(value, bytes) else value for name, value in asdict(export).items()})


def from_argument(text: str) -> PoolExport:
    fields: dict[str, Any] = {
        name: bytes.fromhex(value) if isinstance(value, str) else value for name, value in json.loads(text).items()
    }
    return PoolExport(**fields)


class Writer:
    def __init__(self, export: PoolExport, socket_name: str, pair_id: str) -> None:
        self._cuda = FakeCuda()
        self._link = CudaIpcLink.open(export, socket_name=socket_name, pair_id=pair_id, driver=self._cuda)
        self._page_bytes = 0
        self._pages: list[int] = []
        self._value = 0

    @property
    def is_writing(self) -> bool:
        return bool(self._pages)

    def obey(self, order: list[str]) -> str:
        match order:
            case ["pages", length, *numbers]:
                self._page_bytes, self._pages = int(length), [int(number) for number in numbers]
                return "writing"
            case ["fill", length, number, data]:
                self._cuda.write(self._link.base + page_range(int(number), int(length)).start, bytes.fromhex(data))
                return "filled"
            case ["stop"]:
                self._pages = []
                return "stopped"
            case ["send", data]:
                self._link._line.send(bytes.fromhex(data))
                return "sent"
            case ["commit", data]:
                request = decode_pb2.CommitRequest.FromString(bytes.fromhex(data))
                request.computed_at_ns = time.monotonic_ns()
                return "sent" if self._link.send(request.SerializeToString()) else "not sent"
            case ["hang", "up"]:
                self._link._connection.close()
                return "hung up"
            case ["close"]:
                self._link.close()
                return "closed"
        raise ValueError(order)

    def write(self) -> None:
        self._value = (self._value + 1) % 256
        for page in self._pages:
            address = self._link.base + page_range(page, self._page_bytes).start
            self._cuda.write(address, bytes([self._value]) * self._page_bytes)


def main(export: str, socket_name: str, pair_id: str) -> None:
    try:
        writer = Writer(from_argument(export), socket_name, pair_id)
    except FailedPrecondition as error:
        print(f"refused: {error}", flush=True)
        return
    orders: queue.Queue[list[str]] = queue.Queue()

    def read() -> None:
        for line in sys.stdin:
            orders.put(line.split())

    threading.Thread(target=read, daemon=True).start()
    print("mapped", flush=True)
    while True:
        try:
            print(writer.obey(orders.get(block=not writer.is_writing)), flush=True)
        except queue.Empty:
            pass
        writer.write()


if __name__ == "__main__":
    main(*sys.argv[1:])
