"""A prefill engine's process, reduced to its mapping of a decode worker's pool, on a real GPU.

python -m tests.helpers.gpu_sender EXPORT SOCKET PAIR_ID DEVICE    prints "mapped", or "refused: ..." and ends
stdin: copy 0,1,2 5,6,7    copies pages of its own pool (tests/helpers/gpu_pool.py's, filled) to these, prints "copied"
stdin: store 5,6,7         from now on stores into these pages, always with kernels queued; prints "storing"
stdin: stop                waits for its kernels and stores no more, prints "stopped"
stdin: close               as a link is closed in good order, prints "closed"
stdin: check               prints "alive" if its context still works
At the first error of CUDA's it prints "error: ..." and ends with exit code 1.
"""

from __future__ import annotations

import queue
import sys
import threading
from typing import Final

import torch

from common.errors import FailedPrecondition
from common.handoff.cuda_ipc_link import CudaIpcLink
from prefill_worker.cuda_tools import cuda_tools_for
from tests.helpers.cuda_writer import from_argument
from tests.helpers.gpu_pool import fill, make_pool

LAUNCHES_QUEUED: Final = 50


class Sender:
    def __init__(self, export: str, socket_name: str, pair_id: str, device: str) -> None:
        pool = make_pool(device)
        fill(pool)
        tools = cuda_tools_for(pool)
        assert tools is not None
        self._tools = tools
        self._link = CudaIpcLink.open(from_argument(export), socket_name=socket_name, pair_id=pair_id, driver=tools.driver)
        self._num_pages = pool.num_pages
        self._round = 0
        self._last: torch.cuda.Event | None = None
        self.pages: list[int] = []

    def obey(self, order: list[str]) -> str:
        match order:
            case ["copy", sources, dests]:
                self._tools.copy_pages(_numbers(sources), self._link.base, _numbers(dests))
                torch.cuda.synchronize()
                return "copied"
            case ["store", dests]:
                self.pages = _numbers(dests)
                self.store()
                return "storing"
            case ["stop"]:
                self.pages = []
                torch.cuda.synchronize()
                return "stopped"
            case ["close"]:
                self._link.close()
                return "closed"
            case ["check"]:
                torch.cuda.synchronize()
                torch.ones(1000, device="cuda").sum().item()
                return "alive"
        raise ValueError(order)

    def store(self) -> None:
        """Waits for the round before the last one, so that kernels are queued at any time."""
        for _ in range(LAUNCHES_QUEUED):
            self._round += 1
            sources = [(page + self._round) % self._num_pages for page in self.pages]
            self._tools.copy_pages(sources, self._link.base, self.pages)
        event = torch.cuda.Event()
        event.record()
        if self._last is not None:
            self._last.synchronize()
        self._last = event


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _serve(sender: Sender, orders: queue.Queue[list[str]]) -> None:
    while True:
        try:
            print(sender.obey(orders.get(block=not sender.pages)), flush=True)
        except queue.Empty:
            pass
        if sender.pages:
            sender.store()


def main(*arguments: str) -> int:
    orders: queue.Queue[list[str]] = queue.Queue()

    def read() -> None:
        for line in sys.stdin:
            orders.put(line.split())

    threading.Thread(target=read, daemon=True).start()
    try:
        sender = Sender(*arguments)
        print("mapped", flush=True)
        _serve(sender, orders)
    except FailedPrecondition as error:
        print(f"refused: {error}", flush=True)
    except RuntimeError as error:
        print("error: " + " ".join(str(error).split())[:300], flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
