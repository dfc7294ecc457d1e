"""SecureChannel: a channel whose calls carry this process's token, and which follows its TLS files.

new call --> TLS files as before? --yes--> the connection there is
                    |
                    no --> a new channel; the old one is closed once its last call has ended
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc

Metadata = tuple[tuple[str, str], ...]


class _Underlying:
    """A channel as it was dialled, and how many of its calls are open."""

    def __init__(self, channel: grpc.aio.Channel, version: int) -> None:
        self.channel = channel
        self.version = version
        self.open_calls = 0
        self.is_retired = False
        self._closing: asyncio.Task[None] | None = None

    def watch(self, call: Any) -> None:
        self.open_calls += 1
        call.add_done_callback(self._ended)

    def retire(self) -> None:
        self.is_retired = True
        self._close_if_unused()

    def _ended(self, call: Any) -> None:
        self.open_calls -= 1
        self._close_if_unused()

    def _close_if_unused(self) -> None:
        if self.is_retired and self.open_calls == 0 and self._closing is None:
            self._closing = asyncio.ensure_future(self.channel.close(None))


class SecureChannel(grpc.aio.Channel):
    """Event loop only."""

    def __init__(
        self, dial: Callable[[], grpc.aio.Channel], *, version: Callable[[], int], metadata: Callable[[], Metadata]
    ) -> None:
        """dial: a channel with the files of the moment. version, metadata: asked for each call; a new version means a new
        channel."""
        self._dial = dial
        self._version = version
        self._metadata = metadata
        now = version()  # First: it reads files that have changed, and dial takes them as they were read last.
        self._current = _Underlying(dial(), now)
        self._retired: list[_Underlying] = []

    def current(self) -> _Underlying:
        if (version := self._version()) != self._current.version:
            self._retired = [old for old in self._retired if old.open_calls]
            self._retired.append(self._current)
            self._current.retire()
            self._current = _Underlying(self._dial(), version)
        return self._current

    def call_metadata(self, given: Any) -> Any:
        return (*self._metadata(), *(given or ()))

    async def close(self, grace: float | None = None) -> None:
        for old in (*self._retired, self._current):
            await old.channel.close(grace)

    async def __aenter__(self) -> SecureChannel:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self.current().channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self.current().channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self.current().channel.channel_ready()

    def unary_unary(self, *args: Any, **options: Any) -> Any:
        return _Method(self, "unary_unary", args, options)

    def unary_stream(self, *args: Any, **options: Any) -> Any:
        return _Method(self, "unary_stream", args, options)

    def stream_unary(self, *args: Any, **options: Any) -> Any:
        return _Method(self, "stream_unary", args, options)

    def stream_stream(self, *args: Any, **options: Any) -> Any:
        return _Method(self, "stream_stream", args, options)


class _Method:
    """What a stub calls: the same method on the channel of the moment, with the token of the moment."""

    def __init__(self, channel: SecureChannel, kind: str, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        self._channel = channel
        self._kind, self._args, self._options = kind, args, options
        self._underlying: _Underlying | None = None
        self._method: Any = None

    def __call__(self, *args: Any, metadata: Any = None, **options: Any) -> Any:
        underlying = self._channel.current()
        if underlying is not self._underlying:
            self._underlying = underlying
            self._method = getattr(underlying.channel, self._kind)(*self._args, **self._options)
        call = self._method(*args, metadata=self._channel.call_metadata(metadata), **options)
        underlying.watch(call)
        return call
