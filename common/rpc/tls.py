"""TlsFiles: certificate, key and authorities, read again when a file changes.

A server asks for them at every new connection, a channel at every new call (common/rpc/secure_channel.py); what is connected
stays so. A change that does not hold together yet (a new certificate beside the old key), or is out of date, leaves the last good
files in force.
"""

from __future__ import annotations

import codecs
import logging
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, cast

import grpc

from common.errors import StartError
from common.file_stamp import FileStamp
from common.rpc.tls_checks import check_authorities, check_dates, check_kind, check_pair
from common.small_file import START_SECONDS, read_small

log = logging.getLogger(__name__)
_Stamps = tuple[FileStamp | None, ...]


class _Pem(NamedTuple):
    """PEM texts; None for what is not given."""

    cert: bytes | None
    key: bytes | None
    ca: bytes | None


class TlsFiles:
    """May be used from any thread: gRPC asks for certificates in threads of its own."""

    def __init__(self, *, cert: Path | None = None, key: Path | None = None, ca: Path | None = None) -> None:
        """cert: a chain, the process's own certificate first; key: its key, unencrypted. Both or neither. ca: the authorities
        that peers are verified with; None: those of the system. Raises StartError on files that cannot be used."""
        self._paths = {"--tls-cert": cert, "--tls-key": key, "--tls-ca": ca}
        self._lock = threading.Lock()
        self._expires_at = math.inf
        self._stamps = self._look()
        self.version = 0
        """Rises with every change that took effect."""
        try:
            self._pem = self._read(patience_seconds=START_SECONDS)
        except (OSError, ValueError) as error:
            raise StartError(str(error)) from error
        if key is not None and (stamp := _stamp(key)) is not None and stamp.is_open_to_all:
            log.warning("--tls-key %s can be read by every user of this host (mode %04o): chmod 600", key, stamp.mode)

    def refresh(self) -> int:
        """Takes over files that have changed and are good; the version that holds. Some microseconds if none has."""
        with self._lock:
            if (stamps := self._look()) != self._stamps:
                self._stamps = stamps
                try:
                    self._pem = self._read()
                    self.version += 1
                    log.info("TLS files have changed: new connections use the new ones")
                except (OSError, ValueError) as error:
                    log.error("TLS files have changed and those before hold: %s", error)
            if time.time() > self._expires_at:
                log.error("--tls-cert %s has expired: whoever verifies it refuses this process", self._paths["--tls-cert"])
                self._expires_at = math.inf  # Said once.
            return self.version

    def server_credentials(self, *, mutual: bool) -> grpc.ServerCredentials:
        """mutual: callers must have a certificate of these authorities."""
        last = self.version

        def changed() -> grpc.ServerCertificateConfiguration | None:
            """Called at each new connection, in a thread of gRPC's, one at a time."""
            nonlocal last
            if (version := self.refresh()) == last:
                return None
            last = version
            return self._server_configuration()

        fetch = cast(Callable[[], grpc.ServerCertificateConfiguration], changed)  # None means no change: the stubs do not know.
        return grpc.dynamic_ssl_server_credentials(self._server_configuration(), fetch, mutual)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """With the files as they were at the last refresh()."""
        pem = self._pem
        return grpc.ssl_channel_credentials(root_certificates=pem.ca, private_key=pem.key, certificate_chain=pem.cert)

    def _server_configuration(self) -> grpc.ServerCertificateConfiguration:
        pem = self._pem
        assert pem.cert is not None and pem.key is not None, "a server has a certificate"
        return grpc.ssl_server_certificate_configuration([(pem.key, pem.cert)], root_certificates=pem.ca)

    def _look(self) -> _Stamps:
        return tuple(None if path is None else _stamp(path) for path in self._paths.values())

    def _read(self, *, patience_seconds: float = 0.0) -> _Pem:
        """Raises ValueError naming flag and file."""
        pem = _Pem(*(None if path is None else _bytes(flag, path, patience_seconds) for flag, path in self._paths.items()))
        cert, key, ca = (f"{flag} {path}" for flag, path in self._paths.items())
        if pem.ca is not None:
            check_authorities(pem.ca, name=ca)
        if pem.cert is not None and pem.key is not None:
            check_pair(pem.cert, pem.key, cert_name=cert, key_name=key)
            check_kind(pem.key, name=key)
            self._expires_at = check_dates(pem.cert, pem.key, name=cert, now=time.time())
        return pem


def _bytes(flag: str, path: Path, patience_seconds: float) -> bytes:
    try:
        # gRPC's core takes no byte order mark, with which some editors begin a file.
        return read_small(path, patience_seconds=patience_seconds).removeprefix(codecs.BOM_UTF8)
    except FileNotFoundError:
        raise ValueError(f"{flag} {path} does not exist") from None
    except OSError as error:
        raise ValueError(f"{flag} {path} cannot be read: {(error.strerror or str(error)).lower()}") from None
    except ValueError as error:
        raise ValueError(f"{flag} {path} {error}") from None


def _stamp(path: Path) -> FileStamp | None:
    """None if it is not there."""
    try:
        return FileStamp.of(path)
    except OSError:
        return None
