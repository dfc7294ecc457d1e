"""The shared memory handshake, from the receiver's side: who gets the pool, and when a sender counts as gone."""

from __future__ import annotations

import asyncio
import mmap
import os
import socket
from collections.abc import AsyncIterator

import pytest

from common.handoff import pool_listener
from common.handoff.base import hello_line, receive_welcome
from common.handoff.pool_memory import PoolMemory
from common.handoff.shm_receiver import ShmReceiver
from tests.helpers.eventually import eventually


class Receiver:
    def __init__(self) -> None:
        self.memory = PoolMemory(4, 64)
        self.gone: list[str] = []
        self.shm = ShmReceiver(self.memory, is_known={"pair", "other"}.__contains__, on_gone=self.gone.append)

    async def connect(self, hello: bytes = hello_line("pair")) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(2)
        connection.connect(b"\0" + self.shm.socket_name.encode())
        connection.send(hello)
        return connection

    async def pool(self, connection: socket.socket) -> mmap.mmap:
        descriptor, size = await asyncio.to_thread(receive_welcome, connection)
        mapped = mmap.mmap(descriptor, size)
        os.close(descriptor)
        return mapped


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    receiver = Receiver()
    receiver.shm.start()
    yield receiver
    await receiver.shm.close()


async def test_a_known_pairing_gets_the_pool_and_counts_as_gone_by_eof(receiver: Receiver) -> None:
    connection = await receiver.connect()
    mapped = await receiver.pool(connection)
    mapped[130] = 7
    assert receiver.memory.page_view(2)[2] == 7
    assert receiver.shm.is_connected("pair")
    connection.send(b"chatter is ignored")
    await asyncio.sleep(0.02)
    assert receiver.gone == []
    connection.close()
    await eventually(lambda: receiver.gone == ["pair"], within=1)
    assert not receiver.shm.is_connected("pair")


@pytest.mark.parametrize("hello", [b"unknown\n", b"x" * 200, b"\xff\n", b"pair\nmore\n"])
async def test_who_says_anything_else_gets_nothing(receiver: Receiver, hello: bytes) -> None:
    connection = await receiver.connect(hello)
    with pytest.raises((ConnectionRefusedError, ConnectionResetError)):
        await receiver.pool(connection)
    assert receiver.gone == []


async def test_a_pairing_has_one_connection(receiver: Receiver) -> None:
    first = await receiver.connect()
    await receiver.pool(first)
    second = await receiver.connect()
    with pytest.raises(ConnectionRefusedError):
        await receiver.pool(second)
    assert receiver.gone == []
    assert receiver.shm.is_connected("pair")
    first.close()


async def test_another_user_is_refused(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
    with pytest.raises((ConnectionRefusedError, ConnectionResetError)):
        await receiver.pool(await receiver.connect())


async def test_a_silent_peer_is_hung_up_on_and_holds_nobody_up(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_listener, "HANDSHAKE_SECONDS", 0.05)
    silent = await receiver.connect(b"pai")
    await receiver.pool(await receiver.connect(hello_line("other")))
    assert await asyncio.to_thread(silent.recv, 1) == b""


async def test_closing_the_receiver_ends_connections_without_calling_anybody_gone(receiver: Receiver) -> None:
    connection = await receiver.connect()
    await receiver.pool(connection)
    await receiver.shm.close()
    assert await asyncio.to_thread(connection.recv, 1) == b""
    assert receiver.gone == []


def test_a_peer_cannot_resize_the_pool() -> None:
    memory = PoolMemory(4, 64)
    for size in (0, 10_000):
        with pytest.raises(PermissionError):
            os.ftruncate(memory.descriptor, size)
