"""What a status says beside code and message, read as client libraries do."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status


def retry_after(error: grpc.RpcError) -> timedelta | None:
    """The delay of its google.rpc.RetryInfo; None without one. Raises ValueError if details and status contradict."""
    call: Any = error
    status = rpc_status.from_call(call)
    for detail in status.details if status is not None else ():
        if detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
            info = error_details_pb2.RetryInfo()
            detail.Unpack(info)
            delay: timedelta = info.retry_delay.ToTimedelta()
            return delay
    return None
