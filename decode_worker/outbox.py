"""Outbox: what one router has yet to be told. Steps that pile up while it reads slowly are merged into one message; bounded."""

from __future__ import annotations

import asyncio
from collections import deque

from common.errors import ResourceExhausted
from common.work import TokenOut
from decode_worker.events import Failed, Holding, PrefillStarted, Retracted

News = PrefillStarted | Retracted | Holding | Failed
Message = list[TokenOut] | News

MAX_PENDING = 65_536
"""Tokens and other messages: some seconds of a full batch."""
MAX_TOKENS_PER_MESSAGE = 4_096
"""Keeps a merged message, logprobs and all, well under the size a peer takes."""


class Outbox:
    """Event loop only; one reader. What was put first comes out first."""

    def __init__(self, *, max_pending: int = MAX_PENDING) -> None:
        self._max_pending = max_pending
        self._messages: deque[Message] = deque()
        self._pending = 0
        self._filled = asyncio.Event()

    def __len__(self) -> int:
        """Tokens and other messages not yet written."""
        return self._pending

    def put_tokens(self, tokens: tuple[TokenOut, ...]) -> None:
        """Raises ResourceExhausted, and takes nothing, if that would be more than max_pending."""
        self._reserve(len(tokens))
        last = self._messages[-1] if self._messages else None
        if isinstance(last, list) and len(last) + len(tokens) <= MAX_TOKENS_PER_MESSAGE:
            last.extend(tokens)
        else:
            self._messages.append(list(tokens))

    def put(self, message: News) -> None:
        """Raises ResourceExhausted, and takes nothing, if that would be more than max_pending."""
        self._reserve(1)
        self._messages.append(message)

    async def get(self) -> Message:
        """The next message; waits for one. It counts as pending until written() says otherwise."""
        await self._filled.wait()
        message = self._messages.popleft()
        if not self._messages:
            self._filled.clear()
        return message

    def written(self, message: Message) -> None:
        """What get() gave is on its way."""
        self._pending -= len(message) if isinstance(message, list) else 1

    def _reserve(self, count: int) -> None:
        if self._pending + count > self._max_pending:
            raise ResourceExhausted(f"the router does not read: more than {self._max_pending} tokens wait for it")
        self._pending += count
        self._filled.set()
