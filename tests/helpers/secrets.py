"""Certificates and tokens of a test's own cluster, and what its processes and clients are told of them."""

from __future__ import annotations

import secrets
from datetime import datetime
from functools import cache
from pathlib import Path

import grpc
import trustme

from common.address import Address
from common.rpc.security import Credentials
from common.rpc.tls import TlsFiles
from common.rpc.tokens import TokenFile
from tests.helpers.client import Client

MESSAGE_BYTES = 16 << 20


@cache
def authority() -> trustme.CA:
    """One for the test run: making one takes longer than most tests."""
    return trustme.CA()


class Secrets:
    """Files in a folder."""

    def __init__(self, folder: Path, *, tls: bool = False, tokens: bool = False) -> None:
        self.cert, self.key, self.ca = folder / "cert.pem", folder / "key.pem", folder / "ca.pem"
        self.clients, self.workers = folder / "clients.tokens", folder / "workers.tokens"
        self.operators = folder / "operators.tokens"
        self.has_tls, self.has_tokens = tls, tokens
        if tls:
            self.issue()
        if tokens:
            for path in (self.clients, self.workers, self.operators):
                self.write_tokens(path, [secrets.token_urlsafe(24)])

    def issue(
        self, by: trustme.CA | None = None, *, not_before: datetime | None = None, not_after: datetime | None = None
    ) -> None:
        """A new certificate of authority `by` in place of the one before."""
        by = by or authority()
        made = by.issue_cert("localhost", "127.0.0.1", "::1", not_before=not_before, not_after=not_after)
        replace(self.ca, by.cert_pem.bytes())
        replace(self.key, made.private_key_pem.bytes())
        replace(self.cert, b"".join(blob.bytes() for blob in made.cert_chain_pems))

    def write_tokens(self, path: Path, tokens: list[str]) -> None:
        replace(path, "\n".join(tokens).encode())

    @property
    def client_token(self) -> str:
        return self.clients.read_text().split()[0]

    @property
    def worker_token(self) -> str:
        return self.workers.read_text().split()[0]

    @property
    def operator_token(self) -> str:
        return self.operators.read_text().split()[0]

    def shared_args(self, *, mutual: bool = True) -> list[str]:
        """Of every process."""
        tls = ["--tls-cert", str(self.cert), "--tls-key", str(self.key), "--tls-ca", str(self.ca)] if self.has_tls else []
        tls += ["--no-tls-mutual"] if self.has_tls and not mutual else []
        return tls + (["--worker-token-file", str(self.workers)] if self.has_tokens else [])

    def router_args(self, *, mutual: bool = True) -> list[str]:
        return self.shared_args(mutual=mutual) + (["--auth-token-file", str(self.clients)] if self.has_tokens else [])

    def connect(self, address: str, *, certificate: bool = True, tokens: Path | None = None) -> grpc.aio.Channel:
        """A client's channel. certificate: it has one of its own. tokens: another file than the clients'."""
        mine = {"cert": self.cert, "key": self.key} if certificate else {}
        tls = TlsFiles(ca=self.ca, **mine) if self.has_tls else None
        token = TokenFile(tokens or self.clients, flag="--token-file") if self.has_tokens else None
        return Credentials(tls=tls, token=token).connect(Address.parse(address), max_message_bytes=MESSAGE_BYTES)

    def client(self, address: str, *, certificate: bool = True) -> Client:
        return Client(address, channel=self.connect(address, certificate=certificate))


def replace(path: Path, data: bytes) -> None:
    """As a careful administrator does: whole or not at all."""
    scratch = path.with_suffix(".next")
    scratch.write_bytes(data)
    scratch.chmod(0o600)
    scratch.replace(path)


def bearer(token: str) -> list[tuple[str, str]]:
    return [("authorization", f"Bearer {token}")]
