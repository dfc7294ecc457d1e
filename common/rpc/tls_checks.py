"""Whether PEM texts can be used: authorities, a certificate with its key, and today."""

from __future__ import annotations

import base64
import math
import os
import re
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

NO_CHECK_TIME: Final = 0x200000
"""OpenSSL's X509_V_FLAG_NO_CHECK_TIME, which Python has no name for."""

_REFUSED_KINDS: Final = {
    "Ed25519": b"\x06\x03\x2b\x65\x70",
    "Ed448": b"\x06\x03\x2b\x65\x71",
    "P-521": b"\x06\x05\x2b\x81\x04\x00\x23",
    "secp256k1": b"\x06\x05\x2b\x81\x04\x00\x0a",
}
"""And the object identifiers that their keys have in DER."""


def check_authorities(pem: bytes, *, name: str) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=pem.decode("ascii"))
    except (ssl.SSLError, UnicodeDecodeError):
        raise ValueError(f"{name} must have certificates in PEM form") from None


def check_pair(cert: bytes, key: bytes, *, cert_name: str, key_name: str) -> None:
    """By way of memory files: what is checked is what is used, whatever happens to the files meanwhile."""

    def no_password() -> str:
        raise ValueError(f"{key_name} must not be encrypted")

    with _memory_file(cert) as cert_file, _memory_file(key) as key_file:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert_file, key_file, no_password)
        except ssl.SSLError as error:
            if error.reason == "KEY_VALUES_MISMATCH":
                raise ValueError(f"{key_name} must be the key of {cert_name}") from None
            raise ValueError(f"{cert_name} must be a certificate and {key_name} its key, both in PEM form") from None


def check_kind(key: bytes, *, name: str) -> None:
    """OpenSSL takes keys that gRPC's core does not, or whose certificates its clients refuse, as all processes here are: with
    one a process would start, and no other would reach it."""
    found = re.search(rb"-----BEGIN (?:\w+ )?PRIVATE KEY-----(.*?)-----END", key, re.DOTALL)
    der = b"" if found is None else base64.b64decode(found[1])
    for kind, identifier in _REFUSED_KINDS.items():
        if identifier in der:
            raise ValueError(f"{name} must be an RSA, P-256 or P-384 key, got one of {kind}")


def check_dates(cert: bytes, key: bytes, *, name: str, now: float) -> float:
    """When it expires; now, too: seconds since 1970. Raises ValueError with both dates if it is not valid now. Those of a
    certificate that is for clients only cannot be read here: infinity.

    Python reads a certificate of a peer only, so it is shown to one: a handshake in memory."""
    if not (shown := _shown(cert, key)):
        return math.inf
    begins, ends = (str(shown[date]) for date in ("notBefore", "notAfter"))
    expires_at = float(ssl.cert_time_to_seconds(ends))
    if not ssl.cert_time_to_seconds(begins) <= now <= expires_at:
        raise ValueError(f"{name} must be valid now, it is from {begins} to {ends}")
    return expires_at


def _shown(cert: bytes, key: bytes) -> dict[str, Any]:
    """The first certificate of the chain, as getpeercert() has it; {} if no server may show it."""
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    with _memory_file(cert) as cert_file, _memory_file(key) as key_file:
        server.load_cert_chain(cert_file, key_file)
        client.load_verify_locations(cert_file)
    client.check_hostname = False
    client.verify_flags = ssl.VerifyFlags(client.verify_flags | ssl.VERIFY_X509_PARTIAL_CHAIN | NO_CHECK_TIME)
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = client.wrap_bio(down, up), server.wrap_bio(up, down, server_side=True)
    for side in (*sides, *sides):
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
        except ssl.SSLError:
            return {}
    return sides[0].getpeercert() or {}


@contextmanager
def _memory_file(data: bytes) -> Iterator[str]:
    descriptor = os.memfd_create("pem")
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(data)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)
