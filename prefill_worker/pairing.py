"""Pairing: what was agreed with one decode worker at first contact, and the scope of its pool's mapping here."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import grpc

from common.descriptor import Descriptor
from common.engine.handle import EngineHandle
from common.errors import FailedPrecondition, PdserveError, Unavailable
from common.handoff.base import Transport
from common.handoff.choose import choose
from common.handoff.cuda_ipc import PoolExport
from common.handoff.shm_link import ShmLink
from common.handoff.sim_link import SimLink
from common.rpc.gen.pdserve.v1 import decode_pb2, decode_pb2_grpc
from common.worker_wire import compatibility_to_pb
from prefill_worker.commands import ClosePool, OpenCudaPool, OpenPool
from prefill_worker.link import EngineLink, Link
from prefill_worker.peer_errors import peer_error
from prefill_worker.terms import Terms

PAIR_SECONDS: Final = 5.0
"""How long a decode worker may take to answer Pair."""

_log = logging.getLogger(__name__)


class PairingRefused(FailedPrecondition):
    """The two workers cannot work together; another attempt with the same pair ends the same way."""


class Pairing:
    """Event loop only. Its mapping is closed once it is retired and nobody holds it: the decode worker sees the connection end
    and knows that no late write of this pairing is possible (which frees whatever it still withholds for it)."""

    def __init__(
        self,
        *,
        pair_id: str,
        worker_id: str,
        transport: Transport,
        link: Link | None,
        engine: EngineHandle,
        on_gone: Callable[[Pairing], None],
    ) -> None:
        """link: to its mapped pool. on_gone: called once if the decode worker closes its side of it, so has ended."""
        self.pair_id = pair_id
        self.worker_id = worker_id
        self.transport = transport
        self.is_gone = False
        self.is_retired = False
        self.link = link
        self._engine = engine
        self._holders = 0
        self._closing: asyncio.Task[None] | None = None
        self._tell_gone = on_gone
        if link is not None:
            link.watch(self._on_gone)

    def hold(self) -> None:
        """Keeps the mapping open until let_go."""
        self._holders += 1

    def let_go(self) -> None:
        self._holders -= 1
        assert self._holders >= 0, f"pairing {self.pair_id} was let go too often"
        self._close_if_unused()

    def retire(self) -> None:
        """No new reservation uses it. Idempotent."""
        self.is_retired = True
        self._close_if_unused()

    async def closed(self) -> None:
        """Waits for the mapping of a retired pairing to be closed."""
        if self._closing is not None:
            await self._closing

    def _on_gone(self) -> None:
        self.is_gone = True
        self._tell_gone(self)

    def _close_if_unused(self) -> None:
        if self.is_retired and self._holders == 0 and self._closing is None and self.link is not None:
            self._closing = asyncio.create_task(self._close(self.link), name=f"close pairing {self.pair_id}")

    async def _close(self, link: Link) -> None:
        with suppress(Unavailable):  # An engine that has ended has unmapped everything.
            await self._engine.call(ClosePool(self.pair_id))
        link.close()


async def open_pairing(
    stub: decode_pb2_grpc.DecodeServiceStub,
    *,
    address: str,
    terms: Terms,
    engine: EngineHandle,
    on_gone: Callable[[Pairing], None],
) -> Pairing:
    """Introduces this worker and opens the transport. Raises PairingRefused, or what the call failed with."""
    request = decode_pb2.PairRequest(prefill_worker=terms.worker_id, compatibility=compatibility_to_pb(terms.compatibility))
    try:
        response = await stub.Pair(request, timeout=PAIR_SECONDS)
        if response.page_bytes != terms.page_bytes:
            raise FailedPrecondition(f"page_bytes differs: {response.page_bytes} there, {terms.page_bytes} here")
        transport, link = await _open_transport(response, terms=terms, engine=engine)
    except grpc.aio.AioRpcError as error:
        raise _refused(peer_error(error, address=address)) from None
    except PdserveError as error:
        raise _refused(error) from None
    _log.info("paired with decode worker %s, transport %s", response.decode_worker, transport)
    return Pairing(
        pair_id=response.pair_id,
        worker_id=response.decode_worker,
        transport=transport,
        link=link,
        engine=engine,
        on_gone=on_gone,
    )


def _refused(error: PdserveError) -> PdserveError:
    return PairingRefused(str(error)) if isinstance(error, FailedPrecondition) else error


async def _open_transport(
    response: decode_pb2.PairResponse, *, terms: Terms, engine: EngineHandle
) -> tuple[Transport, Link | None]:
    pair_id, pool = response.pair_id, response.cuda_pool

    async def open_cuda_ipc() -> None:
        try:
            export = PoolExport(
                pool.handle, pool.offset, pool.pool_bytes, pool.device_uuid, nonce=pool.nonce, nonce_offset=pool.nonce_offset
            )
        except ValueError as error:
            raise FailedPrecondition(f"what the decode worker offers is no pool: {error}") from error
        await engine.call(OpenCudaPool(pair_id, export, pool.socket, terms.page_bytes))

    transport, shm = await choose(
        terms.transport,
        shm_socket=response.shm_socket if terms.can_copy else "",
        pair_id=pair_id,
        open_cuda_ipc=open_cuda_ipc if response.HasField("cuda_pool") else None,
    )
    if transport == "cuda_ipc":
        return transport, EngineLink(pair_id, engine)
    if transport == "sim":
        assert shm is not None and terms.sim is not None, "only a simulated worker opens a simulated pool"
        return transport, SimLink(shm, terms.sim, page_bytes=terms.page_bytes)
    if shm is not None:
        await _map(shm, pair_id, terms=terms, engine=engine)
    return transport, shm


async def _map(link: ShmLink, pair_id: str, *, terms: Terms, engine: EngineHandle) -> None:
    try:
        await engine.call(OpenPool(pair_id, Descriptor(link.descriptor), link.pool_bytes, terms.page_bytes))
    except BaseException:
        link.close()
        raise
    link.close_descriptor()
