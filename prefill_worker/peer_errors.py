"""What a failed call to a decode worker means for the request it was made for."""

from __future__ import annotations

from typing import Final

import grpc

from common.errors import PdserveError, Unavailable
from common.rpc.channels import error_of

NO_ANSWER: Final = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED)
"""Statuses that leave open whether the decode worker has acted on the call."""


def peer_error(error: grpc.aio.AioRpcError, *, address: str) -> PdserveError:
    """The decode worker's own refusal, or Unavailable when a limit on the call, which is not the client's deadline, ran out."""
    if error.code() in (grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED):
        return Unavailable(f"the decode worker at {address} did not answer in time: {error.details()}")
    return error_of(error)
