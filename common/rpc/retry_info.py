"""When to try again, as clients of gRPC expect to be told: google.rpc.RetryInfo in the status details.

trailing metadata   grpc-status-details-bin: google.rpc.Status(code, message, details=[RetryInfo(retry_delay)])
"""

from __future__ import annotations

from datetime import timedelta
from functools import lru_cache
from typing import Any

import grpc


@lru_cache(maxsize=64)  # Thousands are refused at once, in the same words.
def status_of(code: grpc.StatusCode, message: str, retry_after: timedelta) -> Any:
    """A grpc.Status: code, details and trailing_metadata."""
    # Imported when asked for: only a router that is full needs them.
    from google.protobuf import any_pb2, duration_pb2
    from google.rpc import error_details_pb2, status_pb2
    from grpc_status import rpc_status

    delay = duration_pb2.Duration()
    delay.FromTimedelta(retry_after)
    detail = any_pb2.Any()
    detail.Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    return rpc_status.to_status(status_pb2.Status(code=code.value[0], message=message, details=[detail]))
