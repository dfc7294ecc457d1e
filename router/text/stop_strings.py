"""Finds stop strings in a text that comes in pieces, and never lets a part of one out.

    | emitted | held: the longest tail that may become a stop string | not yet there |

The first stop string to be complete ends the text; of several that end at the same character, the longest. So the answer does
not depend on how the text was cut into pieces. What is held comes out as soon as it can't become a stop string, or at the end.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple


class StopResult(NamedTuple):
    """text: to emit now. matched: the stop string found; nothing comes after it."""

    text: str
    matched: str | None


class StopStrings:
    """One text's search. Work is bounded by the text: a character rejected as a beginning is emitted and not seen again."""

    def __init__(self, stops: Sequence[str], *, include: bool) -> None:
        """stops: not empty, none of them empty. include: the matched stop string is part of the text."""
        assert stops and all(stops), "stop strings must not be empty"
        self._stops = tuple(stops)
        self._include = include
        self._search_start = re.compile(f"[{''.join(re.escape(char) for char in {stop[0] for stop in stops})}]").search
        self._longest_hold = max(map(len, stops)) - 1
        self._held = ""

    def push(self, text: str, *, may_end: bool = True) -> StopResult:
        """may_end: False lets a stop string that text completes pass as plain text."""
        held = self._held
        if not held and not self._search_start(text):
            return StopResult(text, None)
        text = held + text
        found = self._first_complete(text, len(held)) if may_end else None
        if found is not None:
            start, stop = found
            self._held = ""
            return StopResult(text[: start + len(stop) if self._include else start], stop)
        cut = self._hold_from(text)
        self._held = text[cut:]
        return StopResult(text[:cut], None)

    def flush(self) -> str:
        """The held tail: it never became a stop string."""
        held, self._held = self._held, ""
        return held

    def _first_complete(self, text: str, seen: int) -> tuple[int, str] | None:
        """Earliest end, then earliest start. Only stop strings that end after the first seen characters count."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop, max(0, seen - len(stop) + 1))
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        return best and best[1:]

    def _hold_from(self, text: str) -> int:
        """Where the longest tail that begins a stop string starts; len(text) if none does."""
        found = self._search_start(text, max(0, len(text) - self._longest_hold))
        while found:
            tail = text[found.start() :]
            if any(len(tail) < len(stop) and stop.startswith(tail) for stop in self._stops):
                return found.start()
            found = self._search_start(text, found.start() + 1)
        return len(text)
