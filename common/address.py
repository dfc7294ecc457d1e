"""Where a process listens or is reached."""

from __future__ import annotations

from typing import NamedTuple


class Address(NamedTuple):
    """A host (name, IPv4 or IPv6, without brackets) and a port. Prints as it is written: host:port or [ipv6]:port."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Raises ValueError unless text is host:port or [ipv6]:port. A bare ipv6:port is ambiguous, so it is refused (GRP-08)."""
        host, colon, port = text.rpartition(":")
        bracketed = host.startswith("[") and host.endswith("]")
        if bracketed:
            host = host[1:-1]
        well_formed = bool(host) and bracketed == (":" in host) and not set(host) & set("[]/ ")
        if not (colon and well_formed and port.isascii() and port.isdigit()):
            raise ValueError(f"must be host:port or [ipv6]:port, got {text!r}")
        if int(port) > 65535:
            raise ValueError(f"port must be at most 65535, got {text!r}")
        return cls(host, int(port))

    def with_port(self, port: int) -> Address:
        return Address(self.host, port)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
