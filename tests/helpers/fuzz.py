"""Hostile input for any RPC, made from its descriptors: a new RPC or field is covered without a line here.

Values that servers have answered with (tickets, pair ids, epochs, page ids) go into later messages by the name of their field, so
that many are nearly right: replays, other callers' tickets, orders of another session.
"""

from __future__ import annotations

import random
import struct
from collections import defaultdict
from collections.abc import Callable
from typing import Any, Final

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

KEPT: Final = 64
"""Answered values remembered for each field name."""
MAX_DEPTH: Final = 4
COUNTERS: Final = ("uid", "attempt")
"""What right callers never use twice."""
ODD_INTS: Final = (0, 1, 2, 7, 16, 255, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**53, 2**63 - 1, 2**63, 2**64 - 1, -1, -(2**31))
ODD_FLOATS: Final = (0.0, -0.0, 1.0, -1.0, 1e-45, 1e38, -1e38, float("inf"), float("-inf"), float("nan"))
ODD_TEXTS: Final = (
    "",
    "x",
    "\0",
    "é漢😀",
    "../../etc/passwd",
    "%s%n{}",
    "a" * 300,
    "127.0.0.1:1",
    "unix:/nowhere",
    "::1:5",
    "\u202e",
)

_BITS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}


class Fuzz:
    """A source of messages, the same for the same seed and the same answers."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self._seen: defaultdict[str, list[Any]] = defaultdict(list)

    def learn(self, message: Message) -> None:
        """Keeps the values of an answer, at any depth."""
        for field, value in message.ListFields():
            for item in list(value)[:8] if field.is_repeated else [value]:
                if isinstance(item, Message):
                    self.learn(item)
                elif len(kept := self._seen[field.name]) < KEPT:
                    kept.append(item)
                else:
                    kept[self.rng.randrange(KEPT)] = item

    def learn_bytes(self, kind: type[Message], data: bytes) -> None:
        self.learn(kind.FromString(data))

    def payload(self, kind: type[Message], *, seeds: tuple[Message, ...] = ()) -> bytes:
        """The bytes of one message that may be right, nearly right or nonsense. seeds: right ones to begin with."""
        if (honest := self._honest(kind, seeds)) is not None and self.rng.random() < 0.25:
            return honest.SerializeToString()
        made = self._valid(kind, seeds)
        spoil: Callable[[bytes], bytes] = self.rng.choice(
            [_same, _same, _same, self._flip, self._cut, self._repeat, self._claim_length, self._nest, self._noise, self._bulk]
        )
        return spoil(made)

    def script(self, kind: type[Message], seeds: tuple[Message, ...]) -> list[bytes]:
        """All right messages of a kind in their order, as an honest stream would send them."""
        script = [seed for seed in seeds if isinstance(seed, kind)]
        return [self._renewed(seed).SerializeToString() for seed in script]

    def _honest(self, kind: type[Message], seeds: tuple[Message, ...]) -> Message | None:
        fitting = [seed for seed in seeds if isinstance(seed, kind)]
        return self._renewed(self.rng.choice(fitting)) if fitting else None

    def _renewed(self, seed: Message) -> Message:
        message = type(seed)()
        message.CopyFrom(seed)
        self._freshen(message)
        return message

    def _valid(self, kind: type[Message], seeds: tuple[Message, ...]) -> bytes:
        message: Message
        if (honest := self._honest(kind, seeds)) is not None and self.rng.random() < 0.5:
            message = honest
            self._change_one(message)
        else:
            message = kind()
            self._fill(message, 0)
        return message.SerializeToString()

    def _freshen(self, message: Message) -> None:
        """Names (tickets, pairings) become such as servers have given."""
        for field in message.DESCRIPTOR.fields:
            if field.message_type is not None and not field.is_repeated and message.HasField(field.name):
                self._freshen(getattr(message, field.name))
                continue
            is_name = field.cpp_type == FieldDescriptor.CPPTYPE_STRING and not field.is_repeated
            if field.name in COUNTERS and self.rng.random() < 0.5:
                setattr(message, field.name, self.rng.randrange(1, 1000))
            if is_name and self._seen.get(field.name) and self.rng.random() < 0.8:
                setattr(message, field.name, self._seen[field.name][-1])

    def _change_one(self, message: Message) -> None:
        """Anywhere in it, or nowhere."""
        fields = list(message.DESCRIPTOR.fields)
        if not fields or self.rng.random() < 0.2:
            return
        inner = [value for field, value in message.ListFields() if isinstance(value, Message)]
        if inner and self.rng.random() < 0.7:
            self._change_one(self.rng.choice(inner))
        else:
            self._set(message, self.rng.choice(fields), 0)

    def _fill(self, message: Message, depth: int) -> None:
        for field in message.DESCRIPTOR.fields:
            if self.rng.random() < 0.6:
                self._set(message, field, depth)

    def _set(self, message: Message, field: Any, depth: int) -> None:
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
            getattr(message, field.name)[self._scalar(key)] = self._scalar(value)
        elif field.is_repeated:
            message.ClearField(field.name)
            for _ in range(self.rng.choice((0, 1, 2, 30))):
                if field.message_type is None:
                    getattr(message, field.name).append(self._scalar(field))
                elif depth < MAX_DEPTH:
                    self._fill(getattr(message, field.name).add(), depth + 1)
        elif field.message_type is not None:
            getattr(message, field.name).SetInParent()
            if depth < MAX_DEPTH:
                self._fill(getattr(message, field.name), depth + 1)
        else:
            setattr(message, field.name, self._scalar(field))

    def _scalar(self, field: FieldDescriptor) -> Any:
        seen = self._seen.get(field.name)
        if seen and self.rng.random() < 0.6:
            value = self.rng.choice(seen)
            if type(value) is type(field.default_value):
                return value
        match field.cpp_type:
            case FieldDescriptor.CPPTYPE_BOOL:
                return self.rng.random() < 0.5
            case FieldDescriptor.CPPTYPE_FLOAT | FieldDescriptor.CPPTYPE_DOUBLE:
                return self.rng.choice(ODD_FLOATS)
            case FieldDescriptor.CPPTYPE_ENUM:
                return self.rng.choice((0, 1, 2, 3, 99, -1))
            case FieldDescriptor.CPPTYPE_STRING if field.type == FieldDescriptor.TYPE_BYTES:
                return self.rng.randbytes(self.rng.choice((0, 1, 3, 4, 16, 64, 1000)))
            case FieldDescriptor.CPPTYPE_STRING:
                return self.rng.choice(ODD_TEXTS)
        low, high = _BITS[field.cpp_type]
        return min(max(self.rng.choice((*ODD_INTS, self.rng.randint(0, 40))), low), high)

    def _flip(self, data: bytes) -> bytes:
        changed = bytearray(data)
        for _ in range(self.rng.randint(1, 8) if changed else 0):
            changed[self.rng.randrange(len(changed))] ^= 1 << self.rng.randrange(8)
        return bytes(changed)

    def _cut(self, data: bytes) -> bytes:
        return data[: self.rng.randint(0, len(data))]

    def _repeat(self, data: bytes) -> bytes:
        return data * self.rng.choice((2, 50)) if len(data) < 10_000 else data

    def _claim_length(self, data: bytes) -> bytes:
        """A length-delimited field that says it is far longer than what follows."""
        return (
            data
            + varint(self.rng.randint(1, 15) << 3 | 2)
            + varint(self.rng.choice((2**31 - 1, 2**31, 2**32, 2**63, 1000)))
            + data
        )

    def _nest(self, data: bytes) -> bytes:
        """Messages in messages, deeper than any parser follows."""
        tag = varint(self.rng.randint(1, 5) << 3 | 2)
        for _ in range(self.rng.choice((5, 150))):
            data = tag + varint(len(data)) + data
        return data

    def _noise(self, data: bytes) -> bytes:
        return self.rng.randbytes(self.rng.choice((0, 1, 2, 10, 100, 5000)))

    def _bulk(self, data: bytes) -> bytes:
        """Few bytes of meaning, many of them: packed numbers or one long text."""
        body = self.rng.choice((b"\x01", b"\x80", b"a", struct.pack("<I", 2**31))) * self.rng.choice((1000, 100_000))
        return data + varint(self.rng.randint(1, 15) << 3 | 2) + varint(len(body)) + body


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes((*out, value))


def _same(data: bytes) -> bytes:
    return data


def is_malformed(kind: type[Message], data: bytes) -> bool:
    """The library itself cannot read it."""
    try:
        kind.FromString(data)
    except (DecodeError, RuntimeError):
        return True
    return False
