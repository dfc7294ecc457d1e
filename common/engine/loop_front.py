"""LoopFront: the front of an engine in this process. The event loop reads its inlets for it: they share an interpreter anyhow."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

from common.engine.front import EngineFront
from common.engine.inlet import Inlet, ToCommand


class LoopFront(EngineFront):
    def __init__(self, on_event: Callable[[Any], None]) -> None:
        super().__init__(on_event)
        self._inlets: set[Inlet] = set()

    def listen(self, connection: socket.socket, to_command: ToCommand) -> None:
        inlet = Inlet(connection, to_command)
        self._inlets.add(inlet)
        self._loop.add_reader(inlet.fileno(), self._read, inlet)

    def _close_inlets(self) -> None:
        for inlet in self._inlets:
            self._loop.remove_reader(inlet.fileno())
            inlet.close()
        self._inlets.clear()

    def _read(self, inlet: Inlet) -> None:
        descriptor = inlet.fileno()
        for command in inlet.read():
            self._send(command, None)
        if inlet.has_ended:
            self._loop.remove_reader(descriptor)
            self._inlets.discard(inlet)
