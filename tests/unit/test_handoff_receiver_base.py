"""The arithmetic and the handshake that both ends of a handoff share."""

from __future__ import annotations

import os
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.handoff.base import (
    hello_line,
    page_range,
    pages_ready,
    pages_to_send,
    parse_hello,
    receive_welcome,
    send_welcome,
    tokens_of,
)


@given(st.integers(1, 200), st.integers(0, 12), st.integers(1, 17))
def test_a_tickets_pages_hold_exactly_the_tokens_after_the_prefix(input_len: int, prefix_pages: int, page_size: int) -> None:
    prefix_len = min(prefix_pages, input_len // page_size) * page_size
    count = pages_to_send(input_len=input_len, prefix_len=prefix_len, page_size=page_size)
    held = [
        token
        for index in range(count)
        for token in tokens_of(index, input_len=input_len, prefix_len=prefix_len, page_size=page_size)
    ]
    assert held == list(range(prefix_len, input_len))


@given(st.integers(1, 200), st.integers(0, 200), st.integers(0, 12), st.integers(1, 17))
def test_a_page_is_ready_once_its_last_token_is_computed(
    input_len: int, computed: int, prefix_pages: int, page_size: int
) -> None:
    prefix_len = min(prefix_pages, input_len // page_size) * page_size
    shape = {"input_len": input_len, "prefix_len": prefix_len, "page_size": page_size}
    ready = pages_ready(computed, **shape)
    for index in range(pages_to_send(**shape)):
        assert (index < ready) == (tokens_of(index, **shape)[-1] < computed)


def test_pages_lie_end_to_end() -> None:
    assert [page_range(page, 100) for page in (0, 3)] == [slice(0, 100), slice(300, 400)]


def test_a_hello_is_read_in_pieces_and_nothing_else_is_taken_for_one() -> None:
    line = hello_line("abc")
    assert [parse_hello(line[:end]) for end in range(len(line) + 1)] == [None, None, None, None, "abc"]
    for wrong in (b"abc\nmore", b"x" * 130, b"\xff\n"):
        with pytest.raises(ValueError):
            parse_hello(wrong)


def test_the_pool_travels_as_a_descriptor() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    memory = os.memfd_create("test")
    os.ftruncate(memory, 4096)
    with ours, theirs:
        send_welcome(ours, descriptor=memory, pool_bytes=4096)
        descriptor, size = receive_welcome(theirs)
        os.pwrite(descriptor, b"hello", 10)
        assert (size, os.pread(memory, 5, 10)) == (4096, b"hello")
        os.close(descriptor)
        os.close(memory)


def test_a_receiver_that_hangs_up_is_a_refusal() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    ours.close()
    with theirs, pytest.raises(ConnectionRefusedError):
        receive_welcome(theirs)
