"""What is inflated, and how far."""

from __future__ import annotations

import gzip
import zlib

import pytest

from common.errors import InvalidArgument, ResourceExhausted
from common.rpc.compression import inflated

pytestmark = pytest.mark.unit

LIMIT = 1000
GZIP = gzip.compress(b"abc", mtime=0)


@pytest.mark.parametrize("message", [b"", b"\n\x03abc", b"\x1f", zlib.compress(b"abc")])
def test_what_is_no_gzip_stays_as_it_is(message: bytes) -> None:
    assert inflated(message, max_bytes=LIMIT) is message


@pytest.mark.parametrize("size", [0, 1, LIMIT])
def test_gzip_is_inflated_up_to_the_limit(size: int) -> None:
    assert inflated(gzip.compress(b"x" * size), max_bytes=LIMIT) == b"x" * size


@pytest.mark.parametrize("size", [LIMIT + 1, 50_000_000])
def test_beyond_the_limit_it_is_refused_with_the_limit(size: int) -> None:
    with pytest.raises(ResourceExhausted, match=r"at most 1000 bytes .--max-message-mb., this one inflates to more"):
        inflated(gzip.compress(b"x" * size), max_bytes=LIMIT)


@pytest.mark.parametrize(
    "spoiled",
    [GZIP[:-4], GZIP + b"d", GZIP[:-8] + bytes(8), b"\x1f\x8bno", b"\x1f\x8b"],
    ids=["cut short", "followed by more", "of other sums", "no header", "nothing else"],
)
def test_what_only_begins_like_gzip_cannot_be_read(spoiled: bytes) -> None:
    with pytest.raises(InvalidArgument, match="the message cannot be read: "):
        inflated(spoiled, max_bytes=LIMIT)
