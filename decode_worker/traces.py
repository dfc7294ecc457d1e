"""A decode worker's spans: receive, from granted pages to Commit, and decode, from there to the last token.

Of a prompt that it computes itself: queue, compute, decode. What ends here without its router's asking says why.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from common.core import Req
from common.tracing import Tracing
from common.work import TokenOut
from common.work_key import WorkKey
from decode_worker import commands, events


@dataclass(eq=False)
class _Open:
    """One stage under way. keys: completions that are in it. ticket: of a receive."""

    name: str
    req: Req
    keys: set[WorkKey]
    ticket: str = ""
    began: float = field(default_factory=time.monotonic)


class Traces:
    """Event loop only. Follows what passes between peers and the engine; while traces are off it keeps nothing."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing
        self._by_key: dict[WorkKey, _Open] = {}
        self._by_ticket: dict[str, _Open] = {}
        self._reserving: set[WorkKey] = set()
        """Of those whose Reserve is under way: who has not been ended meanwhile."""

    def __len__(self) -> int:
        """Completions with a span under way."""
        return len(self._by_key)

    async def close(self, *, timeout_seconds: float) -> None:
        """Sends what is left, for so long."""
        await self._tracing.close(timeout_seconds=timeout_seconds)

    @contextmanager
    def reserving(self, req: Req) -> Iterator[None]:
        """A Reserve is with the engine: granted() comes before the block's end, or never."""
        keys = _keys(req) if self._tracing.is_on else []
        self._reserving.update(keys)
        try:
            yield
        finally:
            self._reserving.difference_update(keys)

    def granted(self, req: Req, ticket: str) -> None:
        """A Reserve was answered; of some completions the end may have been told before."""
        if keys := self._reserving.intersection(_keys(req)):
            self._by_ticket[ticket] = self._open("receive", req, keys, ticket=ticket)

    def asked(self, command: Any) -> None:
        """A command is on its way to the engine."""
        if not self._tracing.is_on:
            return
        match command:
            case commands.Prefill(req=req):
                self._open("queue", req, _keys(req))
            case commands.Cancel(key=key):
                self._leave(key, "cancelled")
            case commands.SessionClosed(router_epoch=epoch):
                for key in [key for key in (*self._by_key, *self._reserving) if key.router_epoch == epoch]:
                    self._leave(key, "its router's session ended")

    def committed(self, command: commands.Commit) -> None:
        """The engine takes the request over; only the first time counts."""
        if (stage := self._by_ticket.pop(command.ticket, None)) is not None:
            self._end(stage, "")
            keys = {key for key, token in zip(_keys(stage.req), command.first_tokens, strict=True) if token.finish is None}
            self._go_on("decode", stage.req, keys & stage.keys)

    def ended(self, ticket: str, why: str) -> None:
        """By its sender's doing, if it has not ended before."""
        if (stage := self._by_ticket.get(ticket)) is not None:
            self._end(stage, why)

    def told(self, event: Any) -> None:
        """An event of the engine."""
        if not (self._by_key or self._reserving):
            return
        match event:
            case events.StepTokens(tokens=tokens):
                for token in tokens:
                    if token.finish is not None or token.cached_tokens is not None:
                        self._token(token)
            case events.PrefillStarted(key=key):
                if (stage := self._by_key.get(key)) is not None and stage.name == "queue":
                    self._end(stage, "")
                    self._go_on("compute", stage.req, stage.keys)
            case events.Retracted(key=key):
                self._leave(key, "retracted")
            case events.Failed(failure=failure):
                self._leave(failure.key, failure.error.log_text)
            case events.Stats(states=states) if not any(states):
                self._close_all()

    def _close_all(self) -> None:
        """The engine has nothing left, whatever we have heard of it: a Commit whose caller was cut off may have ended all that a
        ticket had. What waits for its turn may be on its way to the engine still."""
        for stage in {id(stage): stage for stage in self._by_key.values() if stage.name != "queue"}.values():
            self._end(stage, "ended unseen")

    def _token(self, token: TokenOut) -> None:
        """A first or a last one."""
        if (stage := self._by_key.get(token.key)) is None:
            return
        if stage.name in ("compute", "receive"):  # A Commit's answer may be on its way still.
            self._leave(token.key, "")
            self._go_on("decode", stage.req, {token.key})
        if token.finish is not None:
            self._leave(token.key, "", output_tokens=token.index + 1)

    def _go_on(self, name: str, req: Req, keys: set[WorkKey]) -> None:
        """A span for each completion."""
        for key in keys:
            self._open(name, req, [key])

    def _open(self, name: str, req: Req, keys: Any, *, ticket: str = "") -> _Open:
        stage = _Open(name, req, set(keys), ticket)
        self._by_key.update(dict.fromkeys(stage.keys, stage))
        return stage

    def _leave(self, key: WorkKey, error: str, **attributes: int) -> None:
        """One completion ends; the stage does with its last one."""
        self._reserving.discard(key)
        if (stage := self._by_key.pop(key, None)) is not None:
            stage.keys.discard(key)
            if not stage.keys:
                self._say(stage, key.uid, error, attributes)
                self._by_ticket.pop(stage.ticket, None)

    def _end(self, stage: _Open, error: str) -> None:
        """For all its completions."""
        for key in stage.keys:
            del self._by_key[key]
        self._by_ticket.pop(stage.ticket, None)
        self._say(stage, stage.req.uid, error, {})

    def _say(self, stage: _Open, uid: int, error: str, attributes: dict[str, int]) -> None:
        req = stage.req
        self._tracing.stage(
            stage.name,
            parent=req.traceparent,
            began=stage.began,
            ended=time.monotonic(),
            error=error,
            request_id=req.request_id,
            uid=str(uid),
            attempt=req.attempt,
            **attributes,
        )


def _keys(req: Req) -> list[WorkKey]:
    return [req.key.for_completion(offset) for offset in range(req.n)]
