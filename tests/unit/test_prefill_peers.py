"""The decode workers a prefill worker knows: kept while in use, dropped when long unused."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest

from prefill_worker.peers import IDLE_SECONDS, Peers
from prefill_worker.terms import Terms
from tests.helpers.eventually import eventually
from tests.helpers.fake_decode import FakeDecode, is_closed
from tests.helpers.prefill_core import make_req
from tests.helpers.prefill_stand import PrefillStand

pytestmark = pytest.mark.cluster


def terms_of(stand: PrefillStand) -> Terms:
    return Terms("prefill-test", stand.runner.compatibility, stand.runner.pool.page_bytes, transport="shm")


@pytest.fixture
async def stand() -> AsyncIterator[PrefillStand]:
    decode = FakeDecode()
    await decode.start()
    async with PrefillStand(decode, transport="shm") as stand:
        yield stand
    await decode.stop()


async def test_an_address_is_one_peer_and_a_peer_long_unused_is_dropped_and_hangs_up(stand: PrefillStand) -> None:
    now = 0.0
    peers = Peers(terms=terms_of(stand), engine=stand.engine, clock=lambda: now)
    peer = peers.at(stand.decode.address)
    assert peers.at(stand.decode.address) is peer
    req = make_req([1, 2, 3], uid=50)
    lease = await peer.reserve(req, decode_worker=stand.decode.worker_id, deadline=5.0, on_lost=lambda error: None)
    now = 2 * IDLE_SECONDS
    peers.at("127.0.0.1:2")
    (connection,) = stand.decode.connections.values()
    await asyncio.sleep(0.05)
    assert not is_closed(connection), "a peer with a lease is in use"
    peer.leases.give_back(lease)
    await eventually(lambda: stand.decode.ticket.state == "released", within=2)
    peers.at("127.0.0.1:3")
    await eventually(lambda: is_closed(connection), within=2)
    assert peers.at(stand.decode.address) is not peer
    await peers.close()


async def test_a_peer_whose_decode_worker_has_ended_is_dropped_when_the_next_one_is_met(stand: PrefillStand) -> None:
    peers = Peers(terms=terms_of(stand), engine=stand.engine, clock=lambda: 0.0)
    peer = peers.at(stand.decode.address)
    req = make_req([1, 2, 3], uid=51)
    await peer.reserve(req, decode_worker=stand.decode.worker_id, deadline=5.0, on_lost=lambda error: None)
    assert not peer.has_ended
    for connection in stand.decode.connections.values():
        connection.shutdown(socket.SHUT_RDWR)  # As its end shows.
    await eventually(lambda: peer.has_ended and peer.is_idle, within=2)
    assert peers.at(stand.decode.address) is peer, "nobody else has been met"
    peers.at("127.0.0.1:2")
    assert peers.at(stand.decode.address) is not peer
    await peers.close()


async def test_the_end_of_an_older_pairing_does_not_hide_that_the_worker_has_ended(stand: PrefillStand) -> None:
    peers = Peers(terms=terms_of(stand), engine=stand.engine, clock=lambda: 0.0)
    peer = peers.at(stand.decode.address)
    leases = []
    for uid in (52, 53):
        req = make_req([1, 2, 3], uid=uid)
        leases.append(await peer.reserve(req, decode_worker=stand.decode.worker_id, deadline=5.0, on_lost=lambda error: None))
        if uid == 52:
            peer._acquaintance.drop(leases[0].pairing)  # As after a Reserve without an answer.
    older, newer = stand.decode.connections.values()
    newer.shutdown(socket.SHUT_RDWR)
    await eventually(lambda: peer.has_ended, within=2)
    older.shutdown(socket.SHUT_RDWR)
    await eventually(lambda: leases[0].pairing.is_gone, within=2)
    assert peer.has_ended
    await peers.close()


async def test_a_peer_that_is_only_known_is_sent_nothing(stand: PrefillStand) -> None:
    peers = Peers(terms=terms_of(stand), engine=stand.engine, clock=lambda: 0.0)
    peer = peers.at(stand.decode.address)
    assert peer.is_idle and peer.leases.is_idle
    await peers.close()
    assert stand.decode.calls == []
