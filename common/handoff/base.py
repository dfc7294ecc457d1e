"""What the sender and the receiver of KV pages agree on: names, which tokens a page holds, and how shm and cuda_ipc introduce
themselves.

A ticket (one granted Reserve) covers the part of the input that the decode worker lacks. Its pages, in order, on the token axis:

    0               prefix_len                                            input_len
    | already at D  | page_ids[0] | page_ids[1] | ... | page_ids[count-1]  |
    '- whole pages -'---- page_size each ------------- the last may be partly filled

prefix_len is a multiple of page_size; input_len counts input_ids (the prompt, and on a later attempt the output so far). Of every
page the sender sends all page_bytes, of a partly filled one too: a page is one contiguous block over all layers, so its filled
part is not contiguous. Growth pages are the receiver's own business and are not among page_ids.

grpc: HandoffService.Push carries KvFrames; page_index is the place in page_ids, offset a byte in that page. One stream per
ticket; its frames may come in any order but cover every byte exactly once. Closing the stream is the fence after which nothing
is written. A receiver whose pool is on a GPU gathers each page in a slot of host memory (common/handoff/staging.py): it waits
for a free one, but refuses with RESOURCE_EXHAUSTED to wait while another page of the same stream is incomplete.

shm: the receiver's pool is a memfd; page p is bytes [p * page_bytes, (p + 1) * page_bytes) of it. Once per pairing:

    sender                                    receiver (abstract unix socket PairResponse.shm_socket, SOCK_STREAM)
    connect
    pair_id in ASCII, then one newline  --->  same user (SO_PEERCRED)? pair_id known and not connected yet? else: close
                                        <---  8 bytes little-endian, the pool's size; the memfd rides along (SCM_RIGHTS)
    mmap, close the descriptor
    write pages of granted tickets
    munmap, then close the socket       --->  EOF: no late write of this pairing is possible any more

Nothing else is ever sent. The sender keeps the socket open exactly as long as the mapping, so that the kernel, which unmaps a
killed process before it closes its files, tells the truth by EOF. The connection comes before the first Reserve with shm: without
one Reserve is refused.

cuda_ipc: the receiver's pool lies in GPU memory that PairResponse.cuda_pool exports; page p is bytes [p * page_bytes, ...) of it.
The sender's kernels store each token's K and V there while they compute it; a page's bytes beyond its last token stay as they
were. Once per pairing, in the process whose GPU context will map it:

    sender's engine                           receiver (abstract unix socket CudaPool.socket, SOCK_STREAM)
    connect                             --->  same user? holds a pidfd of the process that connected
    pair_id in ASCII, then one newline  --->  pair_id known and not connected yet? else: close
                                        <---  8 bytes little-endian, the pool's size; one end of a pair of connected
                                              SOCK_SEQPACKET sockets, the line, rides along (SCM_RIGHTS)
    open the handle on its own GPU, compare the nonce read through the mapping
    kernels store into pages of granted tickets
    on the line: a CommitRequest        --->  to the receiver's engine itself, which takes it as if it came by
                                              DecodeService.Commit but answers nothing; one a message, any number
    wait for its kernels, unmap
    the word "goodbye", close both      --->  no late write of this pairing is possible any more

Nothing else is ever sent. EOF without the goodbye proves nothing here: files of a killed process may be closed while its GPU
context is still being torn down. Then the proof is that the process has exited, which its pidfd tells. What the line says proves
nothing about that either.

sim: as shm, over a pool of 16 bytes a page; see common/handoff/sim_link.py.

What a refused Reserve means: FAILED_PRECONDITION, pair again (unknown pair_id, or no shm connection of it is open);
UNAVAILABLE, this worker can't take it now (no session with that router, draining, loading); ABORTED, the work key was
cancelled; ALREADY_EXISTS, it has a ticket; OUT_OF_RANGE or INVALID_ARGUMENT, it never will be taken. A refused Commit:
FAILED_PRECONDITION, bytes are missing; ABORTED, the ticket has ended (lease over, cancelled); NOT_FOUND, never heard of;
DATA_LOSS, a checksum differs and the ticket has ended.
"""

from __future__ import annotations

import os
import socket
import struct
import zlib
from array import array
from typing import Final, Literal, get_args

Transport = Literal["cuda_ipc", "shm", "grpc", "sim"]
TRANSPORTS: Final[tuple[Transport, ...]] = get_args(Transport)
"""Best first; the last is between simulated workers alone (common/handoff/sim_link.py)."""
SENDER_WRITES: Final[frozenset[Transport]] = frozenset({"cuda_ipc", "shm", "sim"})
"""Those with which the sender itself writes into the receiver's pool, through a mapping that lasts as long as the pairing."""

FRAME_BYTES: Final = 1 << 20
"""What a sender puts into one KvFrame."""
MAX_FRAME_BYTES: Final = 4 << 20
"""What a receiver takes in one KvFrame."""
MAX_PAIR_ID_BYTES: Final = 128
GOODBYE: Final = b"goodbye"
"""A cuda_ipc sender's last word, and the only one after its hello."""
HANDSHAKE_SECONDS: Final = 5.0
"""How long either side waits for the other's part of the handshake on the unix socket."""

_SIZE = struct.Struct("<Q")


def pages_to_send(*, input_len: int, prefix_len: int, page_size: int) -> int:
    """How many pages a ticket has: those of tokens prefix_len to input_len; 0 if the receiver holds them all."""
    return -(-(input_len - prefix_len) // page_size)


def tokens_of(page_index: int, *, input_len: int, prefix_len: int, page_size: int) -> range:
    """Which tokens the ticket's page number page_index holds."""
    start = prefix_len + page_index * page_size
    return range(start, min(start + page_size, input_len))


def pages_ready(computed_len: int, *, input_len: int, prefix_len: int, page_size: int) -> int:
    """How many of a ticket's leading pages are complete once the first computed_len tokens have their KV."""
    if computed_len >= input_len:
        return pages_to_send(input_len=input_len, prefix_len=prefix_len, page_size=page_size)
    return max(0, computed_len - prefix_len) // page_size


def page_range(page_id: int, page_bytes: int) -> slice:
    """Where page page_id lies in a pool's bytes."""
    return slice(page_id * page_bytes, (page_id + 1) * page_bytes)


def page_checksum(page: memoryview | bytes) -> int:
    """CRC-32 of a page or of a frame's data, as in KvFrame.crc32 and CommitRequest.page_crc32."""
    return zlib.crc32(page)


def hello_line(pair_id: str) -> bytes:
    """The sender's first message on the unix socket."""
    return pair_id.encode("ascii") + b"\n"


def parse_hello(data: bytes) -> str | None:
    """The pair id of a complete hello line, None while the newline is missing; ValueError on what can't become one."""
    if len(data) > MAX_PAIR_ID_BYTES + 1 or (b"\n" in data and not data.endswith(b"\n")):
        raise ValueError(f"a hello must be at most {MAX_PAIR_ID_BYTES} bytes and one newline, got {len(data)} bytes")
    return data[:-1].decode("ascii") if data.endswith(b"\n") else None


def send_welcome(connection: socket.socket, *, descriptor: int, pool_bytes: int) -> None:
    """The receiver's only message: the pool's size with a descriptor, of the pool (shm) or of the line (cuda_ipc), which stays
    open here."""
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [descriptor]))
    connection.sendmsg([_SIZE.pack(pool_bytes)], [rights])


def receive_welcome(connection: socket.socket) -> tuple[int, int]:
    """Waits for send_welcome on a blocking socket: (descriptor, pool bytes); the caller closes the descriptor.

    Raises ConnectionRefusedError if the receiver hung up instead, TimeoutError by the socket's own time-out.
    """
    data, ancillary, _, _ = connection.recvmsg(_SIZE.size, socket.CMSG_SPACE(4), socket.MSG_CMSG_CLOEXEC)
    descriptors = array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(payload[: len(payload) - len(payload) % descriptors.itemsize])
    if len(data) != _SIZE.size or len(descriptors) != 1:
        for descriptor in descriptors:
            os.close(descriptor)
        raise ConnectionRefusedError("the decode worker hung up on this pairing")
    return descriptors[0], _SIZE.unpack(data)[0]
