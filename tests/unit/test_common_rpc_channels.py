"""What is said of a connection that cannot be made."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest
import trustme

from common.rpc.channels import error_of, explained
from common.rpc.security import Security
from common.security_config import SecurityConfig
from tests.helpers.rpc import LOOPBACK, call
from tests.helpers.secrets import Secrets


def side(folder: Path, *, by: trustme.CA, peer_name: str = "") -> Security:
    folder.mkdir()
    secrets = Secrets(folder, tls=True)
    secrets.issue(by)
    return Security(SecurityConfig(tls_cert=secrets.cert, tls_key=secrets.key, tls_ca=secrets.ca, tls_peer_name=peer_name))


@pytest.mark.parametrize(
    ("server", "client", "said"),
    [
        ("tls", "plain", "does it want TLS, or another certificate?"),
        ("plain", "tls", "it does not speak TLS"),
        ("tls", "stranger", "not of an authority that is trusted here, see --tls-ca"),
        ("tls", "misnamed", "for another name than it was called by, see --tls-peer-name"),
    ],
)
async def test_a_connection_that_tls_keeps_from_being_made_is_explained(
    tmp_path: Path, server: str, client: str, said: str
) -> None:
    ours = trustme.CA()
    plain = Security(SecurityConfig())
    kinds = {
        "plain": lambda: plain,
        "tls": lambda: side(tmp_path / "tls", by=ours),
        "stranger": lambda: side(tmp_path / "stranger", by=trustme.CA()),
        "misnamed": lambda: side(tmp_path / "misnamed", by=ours, peer_name="elsewhere.example"),
    }
    listening = kinds[server]()
    running = listening.make_server()
    address = await listening.bind(running, LOOPBACK)
    await running.start()
    try:
        async with kinds[client]().connect(address) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(channel, "unary_unary")
        assert str(error_of(caught.value)).endswith(f"{said})")
    finally:
        await running.stop(0)


def test_what_a_handler_said_is_left_as_it_is() -> None:
    assert explained("Socket closed") == "Socket closed"
