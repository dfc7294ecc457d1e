"""Address: text in, the same text out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.address import Address, UnixAddress


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1:50051", "127.0.0.1", 50051),
        ("localhost:0", "localhost", 0),
        ("[::1]:50051", "::1", 50051),
        ("0.0.0.0:1", "0.0.0.0", 1),
    ],
)
def test_an_address_prints_as_it_was_written(text: str, host: str, port: int) -> None:
    address = Address.parse(text)
    assert address == (host, port)
    assert str(address) == text


@pytest.mark.parametrize(
    "text",
    [
        "::1:50051",
        "::1",
        "localhost",
        "localhost:",
        ":50051",
        "[]:1",
        "[127.0.0.1]:1",
        "a:b:1",
        "host:-1",
        "host:1x",
        "",
        "[::1]",
        "[::1:5",
        "http://h:1",
        "host:²",
        "a..b:1",
        ".:1",
        "x" * 64 + ":1",
    ],
)
def test_grp_08_a_malformed_address_is_refused_with_the_rule_and_the_text(text: str) -> None:
    with pytest.raises(ValueError, match=r"must be host:port, \[ipv6\]:port or unix:/path, got ") as caught:
        Address.parse(text)
    assert repr(text) in str(caught.value)


def test_a_port_above_65535_is_refused() -> None:
    with pytest.raises(ValueError, match="port must be at most 65535, got 'h:65536'"):
        Address.parse("h:65536")


@given(
    host=st.one_of(st.ip_addresses().map(str), st.from_regex(r"[a-z][a-z0-9-]{0,9}(\.[a-z0-9-]{1,9}){0,2}\.?", fullmatch=True)),
    port=st.integers(0, 65535),
)
def test_any_address_survives_printing_and_parsing(host: str, port: int) -> None:
    assert Address.parse(str(Address(host, port))) == (host, port)


def test_grp_08_a_unix_socket_is_an_address_that_prints_as_it_was_written() -> None:
    address = Address.parse("unix:/run/pdserve/router.sock")
    assert isinstance(address, UnixAddress) and address.is_local
    assert str(address) == str(address.with_port(5)) == "unix:/run/pdserve/router.sock"


@pytest.mark.parametrize("text", ["unix:", "unix:relative", "unix:/folder/", "unix:./x", "unix:/a\0b"])
def test_grp_08_a_malformed_unix_address_is_refused_with_the_rule_and_the_text(text: str) -> None:
    with pytest.raises(ValueError, match="must be host:port, .* with an absolute path, got 'unix:"):
        Address.parse(text)


def test_a_path_that_no_socket_can_have_is_refused() -> None:
    with pytest.raises(ValueError, match="the path of a unix socket must be at most 107 bytes"):
        Address.parse("unix:/" + "x" * 107)


@pytest.mark.parametrize(
    ("text", "local"),
    [
        ("127.0.0.1:1", True), ("127.8.9.1:1", True), ("[::1]:1", True), ("localhost:1", True), ("unix:/x", True),
        ("0.0.0.0:1", False), ("[::]:1", False), ("10.0.0.1:1", False), ("localhost.example:1", False), ("host:1", False),
    ],
)  # fmt: skip
def test_what_only_this_host_reaches(text: str, local: bool) -> None:
    assert Address.parse(text).is_local is local


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "0:0:0:0:0:0:0:0", "0", "0.0", "0x0"])
def test_a_wildcard_in_any_writing_is_one(host: str) -> None:
    assert Address(host, 5).is_wildcard and not Address(host, 5).is_local


@pytest.mark.parametrize("text", ["127.0.0.1:5", "[::1]:5", "localhost:5", "10.0.0.1:5", "x:5", "unix:/0"])
def test_what_can_be_dialled_is_no_wildcard(text: str) -> None:
    assert not Address.parse(text).is_wildcard
