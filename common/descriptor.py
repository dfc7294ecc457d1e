"""File descriptors among plain values: whoever carries one to another process sees that it needs more than copying."""

from __future__ import annotations

import os


class Descriptor(int):
    """A file descriptor within a command. It stays the sender's; on the other side, a copy arrives."""


class ReceivedDescriptor(Descriptor):
    """Closed with the last reference to it."""

    def __del__(self) -> None:
        os.close(self)
