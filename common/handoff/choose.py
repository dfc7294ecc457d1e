"""Which transport a pair of workers uses, decided once per pairing by the sender.

shm needs one host and one user: the proof is that the decode worker's abstract socket can be connected and hands over its pool.
cuda_ipc needs the same and a GPU here that reaches the decode worker's: the proof is a nonce read through the mapping.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Literal

from common.errors import FailedPrecondition, Unavailable
from common.handoff.base import Transport
from common.handoff.shm_link import ShmLink, connect_shm

TransportMode = Literal["auto", "cuda_ipc", "shm", "grpc", "sim"]
OpenCudaIpc = Callable[[], Awaitable[None]]

_log = logging.getLogger(__name__)


async def choose(
    mode: TransportMode, *, shm_socket: str, pair_id: str, open_cuda_ipc: OpenCudaIpc | None = None
) -> tuple[Transport, ShmLink | None]:
    """The pair's transport, with an open link if it is shm or sim.

    shm_socket: what PairResponse offers; empty if nothing. open_cuda_ipc: maps the pool that it offers in GPU memory, raises
    FailedPrecondition if it can't; None if nothing is offered. Raises FailedPrecondition if mode insists on one in vain, and
    Unavailable if open_cuda_ipc does, or mode insists on shm or sim and who offered it does not answer.
    """
    if mode in ("auto", "cuda_ipc") and await _opens(mode, open_cuda_ipc):
        return "cuda_ipc", None
    if mode == "grpc":
        return "grpc", None
    try:
        return "sim" if mode == "sim" else "shm", await asyncio.to_thread(connect_shm, shm_socket, pair_id)
    except (OSError, ValueError) as error:
        if mode in ("shm", "sim"):
            # What it offered a moment ago: it may have been killed or stopped since.
            is_lost = shm_socket and isinstance(error, ConnectionError | TimeoutError)
            kind, fault = (Unavailable, "found nobody at") if is_lost else (FailedPrecondition, "is impossible with")
            raise kind(f"--transport {mode} {fault} this decode worker: {error}") from error
        _log.info("no shm with this decode worker, using grpc: %s", error)
        return "grpc", None


async def _opens(mode: TransportMode, open_cuda_ipc: OpenCudaIpc | None) -> bool:
    """Whether cuda_ipc works; raises instead of False if mode insists on it."""
    try:
        if open_cuda_ipc is None:
            raise FailedPrecondition("the decode worker does not offer it")
        await open_cuda_ipc()
        return True
    except FailedPrecondition as error:
        if mode == "cuda_ipc":
            raise FailedPrecondition(f"--transport cuda_ipc is impossible with this decode worker: {error}") from error
        if open_cuda_ipc is not None:  # Between workers on CPUs it is no news.
            _log.info("no cuda_ipc with this decode worker, trying the next transport: %s", error)
        return False
