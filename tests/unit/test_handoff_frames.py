"""Frames are cut out of a stream however it arrives, and what can't be a frame is refused."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.handoff.frames import GOODBYE, MAX_FRAME_BYTES, FrameReader, frame

pytestmark = pytest.mark.unit


@given(st.lists(st.binary(min_size=1, max_size=20), max_size=5), st.integers(1, 7))
def test_frames_come_out_as_they_went_in_whatever_the_pieces(messages: list[bytes], piece: int) -> None:
    stream = b"".join(map(frame, messages)) + GOODBYE
    reader = FrameReader()
    found: list[bytes] = []
    for start in range(0, len(stream), piece):
        assert not reader.said_goodbye
        found += reader.feed(stream[start : start + piece])
    assert found == messages
    assert reader.said_goodbye


def test_nothing_counts_after_the_goodbye() -> None:
    reader = FrameReader()
    assert list(reader.feed(GOODBYE + frame(b"late"))) == []
    assert list(reader.feed(struct.pack("<I", MAX_FRAME_BYTES + 1))) == []
    assert reader.said_goodbye


def test_a_length_that_no_frame_has_is_refused_before_its_bytes_are_awaited() -> None:
    reader = FrameReader()
    feeding = reader.feed(frame(b"good") + struct.pack("<I", MAX_FRAME_BYTES + 1))
    assert next(feeding) == b"good"
    with pytest.raises(ValueError, match="at most"):
        next(feeding)
    assert not reader.said_goodbye


@pytest.mark.parametrize("size", [0, MAX_FRAME_BYTES + 1])
def test_a_frame_is_never_empty_nor_larger_than_a_reader_takes(size: int) -> None:
    with pytest.raises(ValueError, match="a frame must have"):
        frame(bytes(size))


def test_the_largest_frame_is_taken() -> None:
    message = bytes(MAX_FRAME_BYTES)
    assert list(FrameReader().feed(frame(message))) == [message]
