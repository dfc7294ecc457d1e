"""Parcels: the plain values that a worker and its own engine process send each other through a socket pair.

    | bytes of the payload: u32 | descriptors: u16 | payload: one pickled list |      the descriptors ride along (SCM_RIGHTS)

Pickle is right here and nowhere else: both ends are one program of one user, joined by a socket that has no name. What comes
from a peer is protobuf.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import struct
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from common.descriptor import Descriptor, ReceivedDescriptor

if TYPE_CHECKING:
    import torch

_HEAD = struct.Struct("<IH")
_PROTOCOL = 5


class Parcel(NamedTuple):
    """Ready to be sent. descriptors: the sender's own, open until it is."""

    data: bytes
    descriptors: tuple[int, ...]


def pack(values: Sequence[Any]) -> Parcel:
    """Raises what pickling them raises."""
    descriptors: list[int] = []

    def pass_on(descriptor: Descriptor) -> tuple[Any, ...]:
        descriptors.append(int(descriptor))
        return _next_descriptor, ()

    buffer = io.BytesIO()
    buffer.seek(_HEAD.size)
    pickler = pickle.Pickler(buffer, _PROTOCOL)
    pickler.dispatch_table = copyreg.dispatch_table | {Descriptor: pass_on}
    if (torch := sys.modules.get("torch")) is not None:  # Where nobody has imported it, nobody has a tensor.
        pickler.dispatch_table[torch.Tensor] = _flatten
    pickler.dump(list(values))
    buffer.seek(0)
    buffer.write(_HEAD.pack(buffer.getbuffer().nbytes - _HEAD.size, len(descriptors)))
    return Parcel(buffer.getvalue(), tuple(descriptors))


class Unpacker:
    """Cuts what a socket yields into the values of its parcels."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._descriptors: deque[int] = deque()

    def feed(self, data: bytes, descriptors: Iterable[int] = ()) -> Iterator[Any]:
        """The values that are complete with this. Take them all."""
        self._data += data
        self._descriptors.extend(descriptors)
        while len(self._data) >= _HEAD.size:
            length, count = _HEAD.unpack_from(self._data)
            end = _HEAD.size + length
            if len(self._data) < end:
                return
            payload = self._data[_HEAD.size : end]
            del self._data[:end]
            _arrived.extend(ReceivedDescriptor(self._descriptors.popleft()) for _ in range(count))
            yield from pickle.loads(payload)


_arrived: deque[ReceivedDescriptor] = deque()
"""Of the parcel being opened, in the order in which it names them; one thread of a process opens parcels that have any."""


def _next_descriptor() -> ReceivedDescriptor:
    return _arrived.popleft()


def _flatten(tensor: torch.Tensor) -> tuple[Any, ...]:
    # Not as torch does it, which makes a shared memory file of each. None here is larger than a prompt's ids.
    assert tensor.is_cpu and tensor.dim() == 1, f"only lists of the CPU cross over, got {tensor.shape} on {tensor.device}"
    return _unflatten, (tensor.numpy().tobytes(), tensor.dtype)


def _unflatten(data: bytes, dtype: torch.dtype) -> torch.Tensor:
    import torch

    return torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
