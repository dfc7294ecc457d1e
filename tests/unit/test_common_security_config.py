"""Who may listen where, dial whom and show a token there, without what."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from common.address import Address
from common.rpc.secure_channel import SecureChannel
from common.rpc.security import Credentials
from common.rpc.tokens import TokenFile
from common.security_config import SecurityConfig

pytestmark = pytest.mark.unit

FILE = Path("/f")
PUBLIC, HERE = Address("0.0.0.0", 5), (Address("127.0.0.1", 5), Address("::1", 5), Address.parse("unix:/s"))
TLS: dict[str, Any] = {"tls_cert": FILE, "tls_key": FILE}
MUTUAL: dict[str, Any] = {**TLS, "tls_ca": FILE}
TOKENS: dict[str, Any] = {"worker_token_file": FILE}
NO_TLS = "TLS (--tls-cert and --tls-key)"
NO_CLIENTS = "clients' tokens (--auth-token-file) or certificates (--tls-ca)"
NO_WORKERS = "workers' tokens (--worker-token-file) or certificates (--tls-ca)"


@pytest.mark.parametrize(
    ("given", "clients", "missing"),
    [
        ({}, None, [NO_TLS, NO_CLIENTS, NO_WORKERS]),
        (TLS, None, [NO_CLIENTS, NO_WORKERS]),
        (TOKENS, FILE, [NO_TLS]),
        ({**TLS, **TOKENS}, None, [NO_CLIENTS]),
        (TLS, FILE, [NO_WORKERS]),
        ({**MUTUAL, "tls_mutual": False}, None, [NO_CLIENTS, NO_WORKERS]),
        ({**MUTUAL, "tls_mutual": False, **TOKENS}, FILE, []),
        ({**TLS, **TOKENS}, FILE, []),
        (MUTUAL, None, []),
        ({"insecure": True}, None, []),
    ],
)
def test_an_address_that_other_hosts_reach_needs_tls_and_a_credential_of_each_kind_of_caller(
    given: dict[str, Any], clients: Path | None, missing: list[str]
) -> None:
    config = SecurityConfig(**given)
    for address in HERE:
        config.check_listen(address, has_clients=True, client_tokens=clients)
    if not missing:
        config.check_listen(PUBLIC, has_clients=True, client_tokens=clients)
        return
    with pytest.raises(ValueError) as caught:
        config.check_listen(PUBLIC, has_clients=True, client_tokens=clients)
    needs = ", and ".join(missing)
    assert str(caught.value) == f"--listen 0.0.0.0:5 is reached from other hosts: it needs {needs}, or --insecure"


def test_workers_serve_no_clients() -> None:
    SecurityConfig(**TLS, **TOKENS).check_listen(PUBLIC)
    with pytest.raises(ValueError) as caught:
        SecurityConfig(**TLS).check_listen(PUBLIC)
    assert NO_WORKERS in str(caught.value) and "clients" not in str(caught.value)


def test_who_is_dialled_on_another_host_shows_a_certificate() -> None:
    for config in (SecurityConfig(), SecurityConfig(**TOKENS)):
        for address in HERE:
            config.check_dial(address, flag="--router")
        with pytest.raises(ValueError, match="--router far.example:5 is not on this host: it needs TLS .* or --insecure"):
            config.check_dial(Address("far.example", 5), flag="--router")
    for given in (TLS, MUTUAL, {"insecure": True, **TOKENS}):
        SecurityConfig(**given).check_dial(Address("far.example", 5), flag="--router")


@pytest.mark.parametrize("in_clear", [False, True])
async def test_a_token_is_shown_without_tls_to_this_host_only(
    in_clear: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Where workers are, a router learns from themselves."""
    (path := tmp_path / "tokens").write_text("a-token-that-is-long-enough")
    path.chmod(0o600)
    credentials = Credentials(token=TokenFile(path, flag="--worker-token-file"), in_clear=in_clear)

    async def shows_token(address: Address | str) -> bool:
        async with credentials.connect(address, max_message_bytes=1) as channel:
            return isinstance(channel, SecureChannel)

    for address in HERE:
        assert await shows_token(address) and await shows_token(str(address))
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        for far in ("192.0.2.1:5", "far.example:5", "ipv4:127.0.0.1:5"):
            assert await shows_token(far) is await shows_token(far) is in_clear
    what = "travels readable to" if in_clear else "is kept back from"
    assert [record.getMessage() for record in caplog.records] == [
        f"the token {what} {far}, which is not on this host and is dialled without TLS"
        for far in ("192.0.2.1:5", "far.example:5", "ipv4:127.0.0.1:5")
    ]
