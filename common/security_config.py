"""How a process keeps strangers out: what all three roles are configured with (docs/security.md)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from common.address import Address
from common.config import option

SECURITY = "security and limits of the gRPC server"
MIN_MESSAGE_MB = 5
"""A frame of KV, and what is around it."""


@dataclass(frozen=True, kw_only=True)
class SecurityConfig:
    """Raises ValueError on values that cannot work."""

    tls_cert: Path | None = option(None, "certificate chain in PEM, shown to callers and to peers", group=SECURITY)
    tls_key: Path | None = option(None, "its private key", group=SECURITY)
    tls_ca: Path | None = option(
        None, "authorities that peers' certificates are verified with; unset: the system's", group=SECURITY
    )
    tls_mutual: bool | None = option(
        None, "take only callers with a certificate of --tls-ca; default: if that is given", group=SECURITY
    )
    tls_peer_name: str = option(
        "", "name that peers' certificates must carry, if not the host they are dialled at", group=SECURITY
    )
    worker_token_file: Path | None = option(
        None, "tokens of workers and routers among each other: the first is presented, all are accepted", group=SECURITY
    )
    insecure: bool = option(
        False, "listen on and dial any address, even without TLS or tokens, and take workers from anywhere", group=SECURITY
    )
    channelz: bool = option(
        False, "serve grpc.channelz.v1, for workers' tokens: connections and calls from inside", group=SECURITY
    )
    max_message_mb: int = option(16, "largest message, in MiB; the same on all processes", group=SECURITY)
    max_metadata_kb: int = option(16, "largest metadata of a call, in KiB", group=SECURITY)

    def __post_init__(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            given, missing = ("--tls-cert", "--tls-key") if self.tls_key is None else ("--tls-key", "--tls-cert")
            raise ValueError(f"{missing} must be given with {given}")
        if self.tls_ca is not None and self.tls_cert is None:
            raise ValueError("--tls-cert and --tls-key must be given with --tls-ca")
        if self.tls_mutual and self.tls_ca is None:
            raise ValueError("--tls-ca must be given with --tls-mutual")
        if self.tls_peer_name and self.tls_cert is None:
            raise ValueError("--tls-cert and --tls-key must be given with --tls-peer-name")
        if not MIN_MESSAGE_MB <= self.max_message_mb <= 1024:
            raise ValueError(f"--max-message-mb must be in [{MIN_MESSAGE_MB}, 1024], got {self.max_message_mb}")
        if not 4 <= self.max_metadata_kb <= 1024:
            raise ValueError(f"--max-metadata-kb must be in [4, 1024], got {self.max_metadata_kb}")

    @property
    def has_tls(self) -> bool:
        return self.tls_cert is not None

    @property
    def is_mutual(self) -> bool:
        """Callers must show a certificate."""
        return self.tls_ca is not None if self.tls_mutual is None else self.tls_mutual

    def check_listen(self, address: Address, *, has_clients: bool = False, client_tokens: Path | None = None) -> None:
        """Raises ValueError naming what is missing, if other hosts reach address: TLS, and what tells each kind of caller from a
        stranger. has_clients: clients call it too, not only workers and routers."""
        if address.is_local or self.insecure:
            return
        missing = [] if self.has_tls else ["TLS (--tls-cert and --tls-key)"]
        if has_clients and client_tokens is None and not self.is_mutual:
            missing.append("clients' tokens (--auth-token-file) or certificates (--tls-ca)")
        if self.worker_token_file is None and not self.is_mutual:
            missing.append("workers' tokens (--worker-token-file) or certificates (--tls-ca)")
        if missing:
            raise ValueError(f"--listen {address} is reached from other hosts: it needs {', and '.join(missing)}, or --insecure")

    def check_dial(self, address: Address, *, flag: str) -> None:
        """Raises ValueError if what is dialled there may be anybody, who then reads this process's token and its work."""
        if not (address.is_local or self.has_tls or self.insecure):
            raise ValueError(f"{flag} {address} is not on this host: it needs TLS (--tls-cert and --tls-key), or --insecure")
