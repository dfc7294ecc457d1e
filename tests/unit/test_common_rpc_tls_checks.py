"""Which PEM files are taken, of those that OpenSSL takes."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from common.errors import StartError
from common.rpc.server import bind, make_server
from common.rpc.tls import TlsFiles
from tests.helpers.rpc import LOOPBACK
from tests.helpers.secrets import Secrets

KEYS: dict[str, Callable[[], Any]] = {
    "Ed25519": ed25519.Ed25519PrivateKey.generate,
    "Ed448": ed448.Ed448PrivateKey.generate,
    "P-521": lambda: ec.generate_private_key(ec.SECP521R1()),
    "secp256k1": lambda: ec.generate_private_key(ec.SECP256K1()),
}


@pytest.mark.parametrize("kind", KEYS)
def test_a_key_of_a_kind_that_grpc_s_own_clients_refuse_ends_the_start(tmp_path: Path, kind: str) -> None:
    key, now, day = KEYS[kind](), datetime.now(UTC), timedelta(days=1)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    made = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key()).serial_number(1)
    signed = made.not_valid_before(now - day).not_valid_after(now + day).sign(key, None if "Ed" in kind else hashes.SHA256())
    (cert := tmp_path / "cert").write_bytes(signed.public_bytes(Encoding.PEM))
    (path := tmp_path / "key").write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    with pytest.raises(StartError, match=f"--tls-key {path} must be an RSA, P-256 or P-384 key, got one of {kind}"):
        TlsFiles(cert=cert, key=path)


async def test_files_that_begin_with_a_byte_order_mark_are_read(tmp_path: Path) -> None:
    secrets = Secrets(tmp_path, tls=True)
    for path in (secrets.cert, secrets.key, secrets.ca):
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    files = TlsFiles(cert=secrets.cert, key=secrets.key, ca=secrets.ca)
    server = make_server()
    await bind(server, LOOPBACK, credentials=files.server_credentials(mutual=True))
    await server.stop(0)


async def test_what_only_grpc_refuses_is_said_to_be_the_certificate(tmp_path: Path) -> None:
    credentials = grpc.ssl_server_credentials([(b"no key", b"no certificate")])
    with pytest.raises(StartError, match="cannot listen on 127.0.0.1:0: gRPC does not take the certificate or its key"):
        await bind(make_server(), LOOPBACK, credentials=credentials)
