"""A prefill worker's process, reduced to its mapping: writes to pages of a decode worker's pool until told otherwise.

python -m tests.helpers.shm_writer SOCKET PAIR_ID     prints "mapped"
stdin: pages PAGE_BYTES 3 5 ...    from now on fills these pages with changing bytes, one after the other, for ever; prints
"writing" stdin: fill PAGE_BYTES PAGE HEX    writes one page once, prints "filled"
stdin: stop                        writes no more, prints "stopped"
"""

from __future__ import annotations

import mmap
import os
import queue
import socket
import sys
import threading

from common.handoff.base import hello_line, page_range, receive_welcome


def main(socket_name: str, pair_id: str) -> None:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(b"\0" + socket_name.encode())
    connection.sendall(hello_line(pair_id))
    descriptor, size = receive_welcome(connection)
    pool = memoryview(mmap.mmap(descriptor, size))
    os.close(descriptor)
    orders: queue.Queue[list[str]] = queue.Queue()

    def read() -> None:
        for line in sys.stdin:
            orders.put(line.split())

    threading.Thread(target=read, daemon=True).start()
    print("mapped", flush=True)
    pages: list[int] = []
    page_bytes, value = 0, 0
    while True:
        try:
            order = orders.get(block=not pages)
        except queue.Empty:
            order = []
        match order:
            case ["pages", length, *numbers]:
                page_bytes, pages = int(length), [int(number) for number in numbers]
                print("writing", flush=True)
            case ["fill", length, number, data]:
                pool[page_range(int(number), int(length))] = bytes.fromhex(data)
                print("filled", flush=True)
            case ["stop"]:
                pages = []
                print("stopped", flush=True)
        value = (value + 1) % 256
        for page in pages:
            pool[page_range(page, page_bytes)] = bytes([value]) * page_bytes


if __name__ == "__main__":
    main(*sys.argv[1:])
