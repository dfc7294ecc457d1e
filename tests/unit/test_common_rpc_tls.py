"""TLS over real servers and channels: who is let in, what is refused at start, and files that change."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme

from common.address import Address
from common.errors import StartError
from common.rpc.secure_channel import SecureChannel
from common.rpc.security import Security
from common.rpc.tls import TlsFiles
from common.security_config import SecurityConfig
from tests.helpers.rpc import LOOPBACK, add_handlers, call, method
from tests.helpers.secrets import Secrets, authority


async def echo(request: bytes, context: Any) -> bytes:
    return request


async def echo_each(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
    async for request in requests:
        yield request


def security(secrets: Secrets, **options: Any) -> Security:
    return Security(SecurityConfig(tls_cert=secrets.cert, tls_key=secrets.key, tls_ca=secrets.ca, **options))


@asynccontextmanager
async def serving(side: Security, at: Address = LOOPBACK) -> AsyncIterator[Address]:
    server = side.make_server()
    add_handlers(server, {"unary_unary": echo, "stream_stream": echo_each})
    address = await side.bind(server, at)
    await server.start()
    try:
        yield address
    finally:
        await server.stop(0)


async def outcome(channel: grpc.aio.Channel) -> str:
    """ "ok", or the name of the status."""
    async with channel:
        try:
            assert await call(channel, "unary_unary") == [b"hello"]
        except grpc.aio.AioRpcError as error:
            return error.code().name
    return "ok"


@pytest.fixture
def secrets(tmp_path: Path) -> Secrets:
    return Secrets(tmp_path, tls=True)


def other_secrets(tmp_path: Path) -> Secrets:
    """Of an authority that nobody here knows."""
    folder = tmp_path / "other"
    folder.mkdir()
    made = Secrets(folder, tls=True)
    made.issue(trustme.CA())
    return made


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
async def test_two_processes_of_one_authority_reach_each_other(secrets: Secrets, host: str) -> None:
    side = security(secrets)
    async with serving(side, Address(host, 0)) as address:
        assert await outcome(side.connect(address)) == "ok"


async def test_tls_on_a_unix_socket_by_the_name_that_certificates_carry(secrets: Secrets, tmp_path: Path) -> None:
    async with serving(security(secrets), Address.parse(f"unix:{tmp_path}/s")) as address:
        assert await outcome(security(secrets, tls_peer_name="localhost").connect(address)) == "ok"
        assert await outcome(security(secrets, tls_peer_name="other.example").connect(address)) == "UNAVAILABLE"


async def test_mutual_tls_refuses_whoever_has_no_certificate_or_another_authority_s(secrets: Secrets, tmp_path: Path) -> None:
    other = other_secrets(tmp_path)
    async with serving(security(secrets)) as address:
        assert await outcome(secrets.connect(str(address))) == "ok"
        assert await outcome(secrets.connect(str(address), certificate=False)) == "UNAVAILABLE"
        assert await outcome(grpc.aio.insecure_channel(str(address))) == "UNAVAILABLE"
        strangers = grpc.ssl_channel_credentials(secrets.ca.read_bytes(), other.key.read_bytes(), other.cert.read_bytes())
        assert await outcome(grpc.aio.secure_channel(str(address), strangers)) == "UNAVAILABLE"


async def test_without_mutual_tls_a_caller_needs_no_certificate(secrets: Secrets) -> None:
    async with serving(security(secrets, tls_mutual=False)) as address:
        assert await outcome(secrets.connect(str(address), certificate=False)) == "ok"


async def test_a_peer_that_the_authorities_do_not_vouch_for_is_not_talked_to(secrets: Secrets, tmp_path: Path) -> None:
    async with serving(security(other_secrets(tmp_path), tls_mutual=False)) as address:
        assert await outcome(security(secrets).connect(address)) == "UNAVAILABLE"


async def test_a_peer_with_another_name_in_its_certificate_is_not_talked_to(secrets: Secrets) -> None:
    async with serving(security(secrets)) as address:
        assert await outcome(security(secrets, tls_peer_name="localhost").connect(address)) == "ok"
        assert await outcome(security(secrets, tls_peer_name="elsewhere.example").connect(address)) == "UNAVAILABLE"


async def test_new_files_hold_for_new_connections_and_old_calls_live_on(secrets: Secrets) -> None:
    """The whole authority is replaced: a server that had kept its old certificate would fit no new client."""
    side = security(secrets)
    async with serving(side) as address, side.connect(address) as channel:
        old_ca = secrets.ca.read_bytes()
        stream = method(channel, "stream_stream")(timeout=20)
        await stream.write(b"before")
        assert await stream.read() == b"before"

        secrets.issue(trustme.CA())

        old = grpc.ssl_channel_credentials(old_ca, secrets.key.read_bytes(), secrets.cert.read_bytes())
        assert await outcome(grpc.aio.secure_channel(str(address), old)) == "UNAVAILABLE"
        assert await outcome(secrets.connect(str(address))) == "ok"
        assert await call(channel, "unary_unary") == [b"hello"], "the same channel follows, by a new connection"
        await stream.write(b"after")
        assert await stream.read() == b"after"
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF


async def test_a_channel_s_old_connection_is_closed_once_its_calls_have_ended(secrets: Secrets) -> None:
    side = security(secrets)
    async with serving(side) as address, side.connect(address) as channel:
        stream = method(channel, "stream_stream")(timeout=20)
        await stream.write(b"x")
        await stream.read()
        assert isinstance(channel, SecureChannel)
        first = channel.current()
        secrets.issue()
        await call(channel, "unary_unary")
        assert channel.current() is not first and first.open_calls == 1
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF
        await stream.code()
        await asyncio.sleep(0.05)
        assert first.open_calls == 0
        assert first.channel.get_state() is grpc.ChannelConnectivity.SHUTDOWN


@pytest.mark.parametrize("broken", ["key of another", "no PEM", "missing"])
async def test_a_change_that_does_not_hold_together_leaves_the_last_good_files(
    secrets: Secrets, broken: str, caplog: pytest.LogCaptureFixture
) -> None:
    side = security(secrets)
    good = secrets.key.read_bytes()
    async with serving(side) as address:
        if broken == "missing":
            secrets.key.unlink()
        else:
            other = authority().issue_cert("localhost").private_key_pem.bytes()
            secrets.key.write_bytes(other if broken == "key of another" else b"nonsense")
        for _ in range(3):
            assert await outcome(side.connect(address)) == "ok"
        assert len([record for record in caplog.records if "those before hold" in record.message]) == 1
        assert str(secrets.key) in caplog.text
        secrets.key.write_bytes(good)
        assert await outcome(secrets.connect(str(address))) == "ok"


DAY = timedelta(days=1)


@pytest.mark.parametrize(("begins", "ends"), [(-9, -1), (1, 9)], ids=["expired", "not yet valid"])
async def test_a_certificate_out_of_date_ends_the_start_and_does_not_replace_one_in_force(
    secrets: Secrets, begins: int, ends: int, caplog: pytest.LogCaptureFixture
) -> None:
    side, now = security(secrets), datetime.now(UTC)
    secrets.issue(not_before=now + begins * DAY, not_after=now + ends * DAY)
    with pytest.raises(StartError, match=f"--tls-cert {secrets.cert} must be valid now, it is from .* GMT to .* GMT"):
        security(secrets)
    async with serving(side) as address:
        assert await outcome(side.connect(address)) == await outcome(side.connect(address)) == "ok"
        assert [record.message for record in caplog.records if "must be valid now" in record.message] != []
        secrets.issue()
        assert await outcome(side.connect(address)) == "ok"
    assert len([record for record in caplog.records if "those before hold" in record.message]) == 1


def test_a_certificate_that_runs_out_in_service_is_said_once(
    secrets: Secrets, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = datetime.now(UTC)
    secrets.issue(not_before=now - DAY, not_after=now + DAY)
    files = TlsFiles(cert=secrets.cert, key=secrets.key, ca=secrets.ca)
    files.refresh()
    assert "has expired" not in caplog.text
    later = (now + 2 * DAY).timestamp()
    monkeypatch.setattr("common.rpc.tls.time.time", lambda: later)
    files.refresh()
    files.refresh()
    assert caplog.text.count(f"--tls-cert {secrets.cert} has expired") == 1


async def test_a_channel_made_after_the_files_have_changed_shows_the_new_ones(secrets: Secrets) -> None:
    """Nobody has looked at them since: the channel is the first to."""
    side = security(secrets)
    secrets.issue(trustme.CA())
    async with serving(security(secrets)) as address:
        assert await outcome(side.connect(address)) == "ok"


def files(folder: Path, **contents: bytes) -> dict[str, Path]:
    made = Secrets(folder, tls=True)
    paths = {"cert": made.cert, "key": made.key, "ca": made.ca}
    for name, content in contents.items():
        paths[name].write_bytes(content)
    return paths


def encrypted_key() -> bytes:
    from cryptography.hazmat.primitives.serialization import (
        BestAvailableEncryption,
        Encoding,
        PrivateFormat,
        load_pem_private_key,
    )

    key = load_pem_private_key(authority().issue_cert("localhost").private_key_pem.bytes(), None)
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret"))


def test_files_that_cannot_be_used_are_start_errors_that_name_flag_file_and_rule(tmp_path: Path) -> None:
    other = authority().issue_cert("localhost").private_key_pem.bytes()
    cases = {
        "cert": ({"cert": b"junk"}, "--tls-cert {cert} must be a certificate and --tls-key {key} its key, both in PEM form"),
        "key": ({"key": b""}, "--tls-cert {cert} must be a certificate and --tls-key {key} its key, both in PEM form"),
        "other": ({"key": other}, "--tls-key {key} must be the key of --tls-cert {cert}"),
        "ca": ({"ca": b"junk"}, "--tls-ca {ca} must have certificates in PEM form"),
        "encrypted": ({"key": encrypted_key()}, "--tls-key {key} must not be encrypted"),
    }
    for name, (contents, message) in cases.items():
        (folder := tmp_path / name).mkdir()
        paths = files(folder, **contents)
        with pytest.raises(StartError) as caught:
            TlsFiles(**paths)
        assert str(caught.value) == message.format(**paths), name


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    paths = files(tmp_path)
    paths["ca"].unlink()
    with pytest.raises(StartError, match=f"^--tls-ca {paths['ca']} does not exist$"):
        TlsFiles(**paths)


def test_a_key_that_every_user_can_read_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    paths = files(tmp_path)
    TlsFiles(**paths)
    assert caplog.text == ""
    paths["key"].chmod(0o644)
    TlsFiles(**paths)
    assert f"--tls-key {paths['key']} can be read by every user of this host (mode 0644)" in caplog.text
