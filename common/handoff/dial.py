"""dial: the sender's side of the greeting on a decode worker's unix socket, as drawn in common/handoff/base.py."""

from __future__ import annotations

import os
import socket
import struct
from typing import Final

from common.handoff.base import HANDSHAKE_SECONDS, hello_line

PEERCRED: Final = struct.Struct("3i")
"""struct ucred: pid, uid, gid."""


def dial(socket_name: str, pair_id: str) -> socket.socket:
    """A connection on which this pairing has said hello; blocks at most HANDSHAKE_SECONDS a step, as the socket returned does.

    socket_name: abstract, without its leading zero byte; empty if nothing is offered. Raises OSError, or ValueError on names that
    are not ASCII."""
    if not socket_name:
        raise ConnectionRefusedError("the decode worker does not offer it")
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        connection.settimeout(HANDSHAKE_SECONDS)
        connection.connect(b"\0" + socket_name.encode("ascii"))
        _check_same_user(connection)
        connection.sendall(hello_line(pair_id))
    except BaseException:
        connection.close()
        raise
    return connection


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """(pid, uid) of the process that made this connection or listens at its other end, as this process's namespaces see it."""
    pid, uid, _ = PEERCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEERCRED.size))
    return pid, uid


def _check_same_user(connection: socket.socket) -> None:
    # An abstract name can be taken by anybody on the host: prompts' KV must not be written into a stranger's memory.
    _, uid = peer_of(connection)
    if uid != os.getuid():
        raise PermissionError(f"the decode worker runs as user {uid}, this one as {os.getuid()}")
