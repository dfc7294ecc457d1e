"""cuda_ipc comes before the other transports, and makes room for them when it does not work."""

from __future__ import annotations

import asyncio
import secrets
import socket
import struct

import pytest

from common.errors import FailedPrecondition, Unavailable
from common.handoff.choose import choose

pytestmark = pytest.mark.unit


async def test_cuda_ipc_is_taken_before_all_others_if_it_works() -> None:
    async def works() -> None: ...

    for mode in ("auto", "cuda_ipc"):
        found = await choose(mode, shm_socket="pdserve-nobody-listens", pair_id="x", open_cuda_ipc=works)
        assert found == ("cuda_ipc", None)
    assert await choose("grpc", shm_socket="", pair_id="x", open_cuda_ipc=works) == ("grpc", None)


async def test_cuda_ipc_that_does_not_work_says_why_and_makes_room_for_the_next(caplog: pytest.LogCaptureFixture) -> None:
    async def fails() -> None:
        raise FailedPrecondition("its nonce differs")

    with caplog.at_level("INFO"):
        assert await choose("auto", shm_socket="", pair_id="x", open_cuda_ipc=fails) == ("grpc", None)
    assert "no cuda_ipc with this decode worker, trying the next transport: its nonce differs" in caplog.messages
    with pytest.raises(FailedPrecondition, match="--transport cuda_ipc is impossible with this decode worker: its nonce"):
        await choose("cuda_ipc", shm_socket="", pair_id="x", open_cuda_ipc=fails)
    with pytest.raises(FailedPrecondition, match="does not offer it"):
        await choose("cuda_ipc", shm_socket="", pair_id="x")


@pytest.mark.parametrize("is_reset", [True, False])
async def test_a_decode_worker_that_is_killed_while_its_pool_is_opened_is_away_and_not_unfit(is_reset: bool) -> None:
    name = f"pdserve-test-{secrets.token_hex(8)}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{name}")
        listener.listen()
        opening = asyncio.create_task(choose("shm", shm_socket=name, pair_id="x"))
        connection, _ = await asyncio.to_thread(listener.accept)
        if is_reset:  # What it was told is not read.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        else:
            connection.recv(1024)
        connection.close()
        with pytest.raises(Unavailable, match="--transport shm found nobody at this decode worker"):
            await opening
    with pytest.raises(Unavailable, match="refused"):
        await choose("shm", shm_socket=name, pair_id="x")
    with pytest.raises(FailedPrecondition, match="--transport shm is impossible with this decode worker: .* does not offer it"):
        await choose("shm", shm_socket="", pair_id="x")
