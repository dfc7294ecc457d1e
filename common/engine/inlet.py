"""Inlet: a socket on which a peer's process speaks to an engine itself, past its worker's event loop.

    peer's engine  --message-->  to_command  -->  the core, as if it had been posted

For news that may not wait for a process to wake up that would only pass it on. Whoever gives an engine an inlet has decided who
holds the other end; to_command, which is ours, says what that peer's messages can mean.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from typing import Any, Final

MAX_MESSAGE_BYTES: Final = 128 << 10
"""A socket takes as much without its limits being raised. A sender leaves out what is longer; here, it is dropped."""
MESSAGES_AT_ONCE: Final = 64
"""Then the engine's own event loop has its turn again."""

ToCommand = Callable[[bytes], Any]
"""Raises ValueError on what is no command: it is logged and dropped. Picklable: a function of a module, or a partial of one."""

_log = logging.getLogger(__name__)


class Inlet:
    """One thread's. has_ended: the other end is closed and everything was read; then it is closed here, too."""

    def __init__(self, connection: socket.socket, to_command: ToCommand) -> None:
        """connection: SOCK_SEQPACKET, connected; this object's from now on."""
        connection.setblocking(False)
        self._connection = connection
        self._to_command = to_command
        self.has_ended = False

    def fileno(self) -> int:
        return self._connection.fileno()

    def read(self) -> list[Any]:
        """The commands that are there."""
        found: list[Any] = []
        try:
            for _ in range(MESSAGES_AT_ONCE):
                message, _, flags, _ = self._connection.recvmsg(MAX_MESSAGE_BYTES)
                if not message:
                    self.close()
                    break
                found += self._commands(message, is_cut=bool(flags & socket.MSG_TRUNC))
        except BlockingIOError:
            pass
        except OSError:  # Reset by its end: an end, too.
            self.close()
        return found

    def close(self) -> None:
        self._connection.close()
        self.has_ended = True

    def _commands(self, message: bytes, *, is_cut: bool) -> list[Any]:
        try:
            if is_cut:
                raise ValueError(f"a message must have at most {MAX_MESSAGE_BYTES} bytes")
            return [self._to_command(message)]
        except ValueError as error:
            _log.warning("ignored a message of a peer's engine: %s", error)
            return []
