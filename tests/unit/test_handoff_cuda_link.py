"""The two ends of the cuda_ipc socket: who is greeted, what is sent ahead, and when a sender counts as gone."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from common.engine.inlet import MAX_MESSAGE_BYTES
from common.errors import FailedPrecondition
from common.handoff import cuda_ipc_link, cuda_ipc_receiver, dial
from common.handoff.base import GOODBYE, HANDSHAKE_SECONDS, hello_line, receive_welcome
from common.handoff.cuda_driver import CudaError
from common.handoff.cuda_ipc_link import CudaIpcLink
from common.handoff.cuda_ipc_receiver import CudaIpcReceiver
from tests.helpers.eventually import eventually
from tests.helpers.fake_cuda import FakeCuda, cuda_pool

pytestmark = pytest.mark.unit


class Stand:
    """A receiver, and senders that connect to it from this process, which never exits while they do."""

    def __init__(self) -> None:
        self.memory, self.export = cuda_pool(FakeCuda(), num_pages=4, page_bytes=48)
        self.cuda = FakeCuda()
        self.gone: list[str] = []
        self.lines: dict[str, socket.socket] = {}
        self.receiver = CudaIpcReceiver(
            self.export.pool_bytes,
            is_known={"pair", "other"}.__contains__,
            on_gone=self.gone.append,
            on_line=self.lines.__setitem__,
        )

    async def link(self, pair_id: str = "pair") -> CudaIpcLink:
        return await asyncio.to_thread(
            CudaIpcLink.open, self.export, socket_name=self.receiver.socket_name, pair_id=pair_id, driver=self.cuda
        )

    async def connect(self, pair_id: str = "pair") -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(2)
        connection.connect(b"\0" + self.receiver.socket_name.encode())
        connection.sendall(hello_line(pair_id))
        line, size = await asyncio.to_thread(receive_welcome, connection)
        os.close(line)
        assert size == self.export.pool_bytes
        return connection

    def close_lines(self) -> None:
        for line in self.lines.values():
            line.close()
        self.lines.clear()


@pytest.fixture
async def stand() -> AsyncIterator[Stand]:
    stand = Stand()
    stand.receiver.start()
    yield stand
    await stand.receiver.close()
    stand.close_lines()


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_a_link_that_closes_in_good_order_is_gone_at_once(stand: Stand) -> None:
    before = open_descriptors()
    for _ in range(2):
        link = await stand.link()
        assert stand.receiver.is_connected("pair") and stand.gone == []
        link.close()
        await eventually(lambda: stand.gone == ["pair"], within=1)
        assert not stand.receiver.is_connected("pair")
        stand.gone.clear()
        stand.close_lines()
    assert stand.cuda.num_mapped == 0
    assert open_descriptors() == before


async def test_commits_go_to_the_line_s_owner_whole_and_its_end_is_the_link_s(stand: Stand) -> None:
    link, other = await stand.link(), await stand.link("other")
    messages = [b"a", b"b" * MAX_MESSAGE_BYTES, b"c"]
    for message in messages:
        assert link.send(message)
        assert stand.lines["pair"].recv(MAX_MESSAGE_BYTES + 1) == message
    assert not link.send(b"") and not link.send(bytes(MAX_MESSAGE_BYTES + 1))
    assert stand.receiver.is_connected("pair") and stand.gone == []
    link.close()
    assert stand.lines["pair"].recv(1) == b""
    assert other.send(b"still here") and stand.lines["other"].recv(100) == b"still here"
    other.close()


async def test_without_a_line_the_sender_is_refused_before_it_has_the_pool(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pair_id: str, line: socket.socket) -> None:
        line.close()
        raise OSError("too many open files")

    monkeypatch.setattr(stand.receiver, "_on_line", refuse)
    before = open_descriptors()
    with pytest.raises(FailedPrecondition):
        await stand.link()
    assert not stand.receiver.is_connected("pair") and stand.cuda.num_mapped == 0
    await eventually(lambda: open_descriptors() == before, within=1)


async def test_a_refused_sender_costs_no_descriptor(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("too many open files")

    before = open_descriptors()
    with monkeypatch.context() as patch:
        patch.setattr(socket, "socketpair", refuse)
        with pytest.raises(FailedPrecondition):
            await stand.link()
    await eventually(lambda: open_descriptors() == before, within=1)


async def test_eof_of_a_process_that_lives_proves_nothing(stand: Stand) -> None:
    connection = await stand.connect()
    connection.close()
    await eventually(lambda: not stand.receiver.is_connected("pair"), within=1)
    await asyncio.sleep(0.1)
    assert stand.gone == []
    with pytest.raises(ConnectionRefusedError):  # The pairing's first sender may still write.
        await stand.connect()


@pytest.mark.parametrize("said", [b"good", GOODBYE + b"!", b"." + GOODBYE, GOODBYE * 2])
async def test_anything_but_the_goodbye_proves_nothing(stand: Stand, said: bytes) -> None:
    connection = await stand.connect()
    connection.sendall(said)
    connection.close()
    await eventually(lambda: not stand.receiver.is_connected("pair"), within=1)
    await asyncio.sleep(0.05)
    assert stand.gone == []


async def test_a_process_whose_pid_cannot_be_seen_is_refused(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_ipc_receiver, "peer_of", lambda connection: (0, os.getuid()))
    with pytest.raises(FailedPrecondition, match="hung up on this pairing"):
        await stand.link()
    assert stand.gone == []


async def test_a_sender_that_left_before_it_was_welcomed_is_no_sender(stand: Stand) -> None:
    before = open_descriptors()
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(b"\0" + stand.receiver.socket_name.encode())
    connection.sendall(hello_line("pair"))
    connection.close()
    await asyncio.sleep(0.1)
    assert not stand.receiver.is_connected("pair") and stand.gone == []
    assert open_descriptors() == before
    (await stand.link()).close()


async def test_refusals_say_why_and_leave_nothing_behind(stand: Stand) -> None:
    before = open_descriptors()
    for wrong, name, pair_id in (
        ("does not offer it", "", "pair"),
        ("Connection refused", "pdserve-nobody-listens", "pair"),
        ("hung up on this pairing", stand.receiver.socket_name, "a stranger"),
    ):
        with pytest.raises(FailedPrecondition, match=wrong):
            await asyncio.to_thread(CudaIpcLink.open, stand.export, socket_name=name, pair_id=pair_id, driver=stand.cuda)
    assert stand.cuda.calls == []
    assert open_descriptors() == before


async def test_a_pool_of_another_size_than_was_said_is_refused_with_a_goodbye(stand: Stand) -> None:
    stand.export = replace(stand.export, pool_bytes=stand.export.pool_bytes - 48)
    with pytest.raises(FailedPrecondition, match="its pool has"):
        await stand.link()
    await eventually(lambda: stand.gone == ["pair"], within=1)


async def test_a_pool_that_cannot_be_mapped_is_refused_with_a_goodbye(stand: Stand) -> None:
    stand.cuda.fails = {"check_access"}
    with pytest.raises(FailedPrecondition, match="cannot be mapped"):
        await stand.link()
    await eventually(lambda: stand.gone == ["pair"], within=1)


async def test_a_decode_worker_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, stand: Stand) -> None:
    assert HANDSHAKE_SECONDS <= 5
    monkeypatch.setattr(dial, "HANDSHAKE_SECONDS", 0.1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(b"\0pdserve-silent-gpu")
        listener.listen()
        with pytest.raises(FailedPrecondition, match="does not answer"):
            CudaIpcLink.open(stand.export, socket_name="pdserve-silent-gpu", pair_id="pair", driver=stand.cuda)


async def test_a_decode_worker_that_ends_shows_on_the_link(stand: Stand) -> None:
    link = await stand.link()
    assert not link.is_peer_gone()
    await stand.receiver.close()
    await eventually(link.is_peer_gone, within=1)
    link.send(b"nobody reads it")
    link.close()


async def test_a_commit_is_left_out_while_the_decode_worker_does_not_read(stand: Stand) -> None:
    link = await stand.link()
    sent = 0
    while link.send(bytes(1000)):
        sent += 1
    assert sent > 10
    for _ in range(sent):
        assert len(stand.lines["pair"].recv(2000)) == 1000
    assert link.send(b"next") and stand.lines["pair"].recv(100) == b"next"
    stand.close_lines()
    assert not link.send(b"nobody reads it") and not link.is_peer_gone()
    link.close()


async def test_a_lost_context_is_never_followed_by_a_goodbye(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    link = await stand.link()
    monkeypatch.setattr(cuda_ipc_link, "GOODBYE_SECONDS", 0.1)
    stand.cuda.is_lost = True
    with pytest.raises(CudaError):
        link.close()
    del link
    await eventually(lambda: not stand.receiver.is_connected("pair"), within=1)
    await asyncio.sleep(0.05)
    assert stand.gone == []
