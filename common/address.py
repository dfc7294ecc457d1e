"""Where a process listens or is reached."""

from __future__ import annotations

import ipaddress
import re
from pathlib import PurePosixPath
from typing import Final, NamedTuple

RULE: Final = "must be host:port, [ipv6]:port or unix:/path"
MAX_SOCKET_PATH_BYTES: Final = 107
"""What the kernel takes (sun_path)."""


class Address(NamedTuple):
    """A host (name, IPv4 or IPv6, without brackets) and a port. Prints as it is written: host:port or [ipv6]:port."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Raises ValueError unless text is host:port, [ipv6]:port or unix:/path, which gives a UnixAddress. A bare ipv6:port is
        ambiguous, so it is refused (GRP-08)."""
        if text.startswith("unix:"):
            return UnixAddress.at(text.removeprefix("unix:"))
        host, colon, port = text.rpartition(":")
        bracketed = host.startswith("[") and host.endswith("]")
        if bracketed:
            host = host[1:-1]
        well_formed = bool(host) and bracketed == (":" in host) and not set(host) & set("[]/ ")
        if not (colon and well_formed and _is_name(host) and port.isascii() and port.isdigit()):
            raise ValueError(f"{RULE}, got {text!r}")
        if int(port) > 65535:
            raise ValueError(f"port must be at most 65535, got {text!r}")
        return cls(host, int(port))

    def with_port(self, port: int) -> Address:
        return Address(self.host, port)

    @property
    def is_local(self) -> bool:
        """Only processes of this host reach it. A name other than localhost is not looked up: it may mean anything."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def is_wildcard(self) -> bool:
        """Every address of this host, and so none that could be dialled: 0.0.0.0, [::], and 0, which the system takes for it."""
        try:
            return ipaddress.ip_address(self.host).is_unspecified
        except ValueError:
            return re.fullmatch(r"(0x)?0+(\.(0x)?0+)*", self.host) is not None

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def _is_name(host: str) -> bool:
    """What a resolver takes: its labels have 1 to 63 characters."""
    try:
        host.encode("idna")
    except UnicodeError:
        return False
    return True


class UnixAddress(Address):
    """A unix socket; host is its path. Prints as unix:/path."""

    __slots__ = ()

    @classmethod
    def at(cls, path: str) -> UnixAddress:
        """Raises ValueError on a path that no socket can have."""
        if not PurePosixPath(path).is_absolute() or path.endswith("/") or "\0" in path:
            raise ValueError(f"{RULE} with an absolute path, got {'unix:' + path!r}")
        if len(path.encode()) > MAX_SOCKET_PATH_BYTES:
            raise ValueError(f"the path of a unix socket must be at most {MAX_SOCKET_PATH_BYTES} bytes, got {path!r}")
        return cls(path, 0)

    def with_port(self, port: int) -> UnixAddress:
        return self

    @property
    def is_local(self) -> bool:
        return True

    @property
    def is_wildcard(self) -> bool:
        return False

    def __str__(self) -> str:
        return f"unix:{self.host}"
