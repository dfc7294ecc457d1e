"""Token ids to text as they come, whole characters only.

The rule, the same streamed or in one piece: the concatenation of all pushes and the flush equals Tokenizer.decode of all ids.
Bytes that form no character become U+FFFD as in Python's and the tokenizer's lossy decoding; bytes that may still become one
are held until they do or until the end.

Byte-level tokenizers hold an incomplete character, three bytes at most. With sentencepiece byte fallback a run of byte tokens
is held until another token ends it, because one invalid byte turns every byte of the run into U+FFFD. Any other decoder is
asked for the text of a short window of tokens, once without and once with the new ones; text that the new ones may still
change (it ends in U+FFFD, or what is out already would read differently) is held for MAX_UNDECIDED tokens at most. The equality
then holds for decoders whose text depends on the token before, which is all of those in use.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Sequence
from os.path import commonprefix
from typing import Protocol

from router.text.pieces import PieceTable
from router.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
MAX_UNDECIDED = 64


class Detokenizer(Protocol):
    """One text in the making."""

    def push(self, ids: Sequence[int]) -> str:
        """The text that these ids complete. ids: each in [0, vocab_size)."""

    def flush(self) -> str:
        """What is still held; the end."""


def make_detokenizer(tokenizer: Tokenizer, *, include_special: bool) -> Detokenizer:
    table = tokenizer.shown if include_special else tokenizer.hidden
    if table is None:
        return WindowDetokenizer(tokenizer, include_special=include_special)
    return RunDetokenizer(table) if table.kind == "runs" else ByteDetokenizer(table)


class ByteDetokenizer:
    """For byte-level tokenizers. _held: the bytes of an incomplete character."""

    def __init__(self, table: PieceTable) -> None:
        self._pieces = table.pieces
        self._held = b""

    def push(self, ids: Sequence[int]) -> str:
        if len(ids) == 1 and not self._held:
            piece = self._pieces[ids[0]]
            if piece.__class__ is str:
                return piece
        return "".join([self._push(self._pieces[token_id]) for token_id in ids])

    def _push(self, piece: str | bytes) -> str:
        if isinstance(piece, str):
            if not self._held:
                return piece
            return self.flush() + piece  # a whole character follows: the held bytes never become one
        data = self._held + piece
        text, used = utf_8_decode(data, "replace", False)
        self._held = data[used:]
        return text

    def flush(self) -> str:
        text = self._held.decode(errors="replace")
        self._held = b""
        return text


class RunDetokenizer:
    """For sentencepiece byte fallback. _run: the bytes since the last ordinary token."""

    def __init__(self, table: PieceTable) -> None:
        self._pieces = table.pieces
        self._run = b""
        self._strip_char, self._strip_left = table.strip_char, table.strip_count

    def push(self, ids: Sequence[int]) -> str:
        out = []
        for token_id in ids:
            piece = self._pieces[token_id]
            if isinstance(piece, str):
                if self._run:
                    out.append(self._end_run())
                out.append(piece)
            else:
                self._run += piece
        return self._strip("".join(out))

    def flush(self) -> str:
        return self._strip(self._end_run())

    def _end_run(self) -> str:
        run, self._run = self._run, b""
        try:
            return run.decode()
        except UnicodeDecodeError:
            return REPLACEMENT * len(run)

    def _strip(self, text: str) -> str:
        while self._strip_left and text:
            if text[0] != self._strip_char:
                self._strip_left = 0
            else:
                self._strip_left -= 1
                text = text[1:]
        return text


class WindowDetokenizer:
    """For any decoder. _window: the tokens last emitted, which the next ones' text may depend on, and those still held."""

    def __init__(self, tokenizer: Tokenizer, *, include_special: bool) -> None:
        self._tokenizer = tokenizer
        self._include_special = include_special
        self._window: list[int] = []
        self._emitted = 0  # leading tokens of the window whose text is out

    def push(self, ids: Sequence[int]) -> str:
        visible = [i for i in ids if self._tokenizer.is_visible(i, include_special=self._include_special)]
        self._window += visible
        return self._take(final=False) if visible else ""

    def flush(self) -> str:
        return self._take(final=True)

    def _take(self, *, final: bool) -> str:
        before = self._tokenizer.decode(self._window[: self._emitted], include_special=True)
        now = self._tokenizer.decode(self._window, include_special=True)
        undecided = now.endswith(REPLACEMENT) or not now.startswith(before)
        if undecided and not final and len(self._window) - self._emitted < MAX_UNDECIDED:
            return ""
        text = now[len(commonprefix([before, now])) :]
        self._window = self._window[self._emitted :]
        self._emitted = len(self._window)
        return text
