"""What each token adds to a text, as one table, for the decoders that work token by token.

A piece is a str when the token's bytes are whole characters, else bytes. b"" adds nothing: special tokens when they are
not shown, ids that no token has.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

Piece = str | bytes


@dataclass(frozen=True)
class PieceTable:
    """pieces: by token id.
    kind: "bytes": the text is the UTF-8 of all pieces end to end. "runs": the bytes between two str pieces are a run, and one
    invalid byte spoils the whole run (sentencepiece byte fallback).
    strip_char, strip_count: so many of this character are dropped at the very start of the text.
    """

    pieces: list[Piece]
    kind: Literal["bytes", "runs"]
    strip_char: str = ""
    strip_count: int = 0

    def without(self, hidden: Collection[int]) -> PieceTable:
        """The same table with these ids adding nothing."""
        pieces = [b"" if token_id in hidden else piece for token_id, piece in enumerate(self.pieces)]
        return replace(self, pieces=pieces)


def piece_table(decoder: Any, tokens: Sequence[str | None]) -> PieceTable | None:
    """decoder: tokenizer.json's entry. tokens: by id, None where there is none. None: this decoder needs whole texts."""
    match decoder:
        case {"type": "ByteLevel"}:
            return PieceTable(_pieces(tokens, _byte_level_piece), "bytes")
        case {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                *rest,
            ],
        }:
            return _fallback_table(tokens, old, new, rest)
    return None


def _fallback_table(tokens: Sequence[str | None], old: str, new: str, rest: list[Any]) -> PieceTable | None:
    table = PieceTable(_pieces(tokens, lambda token: _fallback_piece(token.replace(old, new))), "runs")
    match rest:
        case []:
            return table
        case [{"type": "Strip", "content": str(char), "start": int(count), "stop": 0}]:
            return replace(table, strip_char=char, strip_count=count)
    return None


def _pieces(tokens: Sequence[str | None], piece: Callable[[str], Piece]) -> list[Piece]:
    return [b"" if token is None else piece(token) for token in tokens]


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's: a visible character for each byte. Latin-1's visible ones stand for themselves, the others follow from U+0100."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(0x100 + i): byte for i, byte in enumerate(hidden)}


_BYTE_OF = _byte_alphabet()
_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_piece(token: str) -> Piece:
    """A token with a character outside the alphabet (an added one) stands for itself."""
    try:
        data = bytes([_BYTE_OF[char] for char in token])
    except KeyError:
        data = token.encode()
    try:
        return data.decode() or b""
    except UnicodeDecodeError:
        return data


def _fallback_piece(token: str) -> Piece:
    match = _FALLBACK.fullmatch(token)
    return bytes.fromhex(match[1]) if match else token
