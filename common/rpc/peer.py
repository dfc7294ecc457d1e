"""Where a caller is, from a peer as gRPC writes it."""

from __future__ import annotations

import ipaddress
from urllib.parse import unquote


def host_of(peer: str) -> str:
    """The host in a peer as gRPC writes it: ipv4:1.2.3.4:5, ipv6:[::1]:5 (maybe percent-encoded), unix:/path."""
    kind, _, rest = unquote(peer).partition(":")
    return rest.rpartition(":")[0].strip("[]") if kind in ("ipv4", "ipv6") else kind


def is_local_peer(peer: str) -> bool:
    host = host_of(peer)
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "unix"
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
