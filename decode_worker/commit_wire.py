"""A CommitRequest as the engine's command, whichever way it came."""

from __future__ import annotations

from google.protobuf.message import DecodeError

from common.rpc.gen.pdserve.v1 import decode_pb2
from common.wire import token_from_pb
from decode_worker.commands import Commit, CommitAhead


def commit_from_pb(request: decode_pb2.CommitRequest) -> Commit:
    """Raises ValueError on tokens that are none."""
    return Commit(
        request.ticket,
        first_tokens=tuple(token_from_pb(token, 0) for token in request.first_tokens),
        pages_sent=request.pages_sent,
        page_crc32=tuple(request.page_crc32),
        computed_at=request.computed_at_ns / 1e9,
    )


def commit_ahead_from_bytes(message: bytes, *, pair_id: str) -> CommitAhead:
    """Of this pairing's sender. Raises ValueError on what is no CommitRequest."""
    try:
        return CommitAhead(pair_id, commit_from_pb(decode_pb2.CommitRequest.FromString(message)))
    except DecodeError as error:
        raise ValueError(f"{len(message)} bytes are no CommitRequest") from error
