"""Security: a process's server and channels, made as its configuration says."""

from __future__ import annotations

import logging
from datetime import timedelta
from pathlib import Path
from typing import Final

import grpc

from common.address import Address
from common.errors import StartError
from common.rpc.auth import HEADER, SCHEME, AuthInterceptor, Gate
from common.rpc.call_limit import CallLimit
from common.rpc.channels import PEER_SILENCE, make_channel
from common.rpc.secure_channel import Metadata, SecureChannel
from common.rpc.server import CLIENT_SILENCE, bind, make_server
from common.rpc.tls import TlsFiles
from common.rpc.tokens import TokenFile, check_apart
from common.security_config import SecurityConfig

MIB: Final = 1 << 20
CHANNELZ: Final = "grpc.channelz.v1.Channelz"
WARNINGS: Final = 100
"""Addresses that are warned of, each once: workers come and go."""
log = logging.getLogger(__name__)


class Credentials:
    """What a process shows to those it dials: a token, and its side of TLS. Any part may be absent."""

    def __init__(
        self, *, tls: TlsFiles | None = None, token: TokenFile | None = None, peer_name: str = "", in_clear: bool = False
    ) -> None:
        """peer_name: what the peer's certificate must carry instead of the host that is dialled. in_clear: the token is shown to
        other hosts also without TLS; else it is kept back from them, which they say when they are called."""
        self._tls = tls
        self._token = token
        self._peer_name = peer_name
        self._in_clear = in_clear
        self._warned: set[str] = set()

    def connect(self, address: Address | str, *, max_message_bytes: int, silence: timedelta = PEER_SILENCE) -> grpc.aio.Channel:
        if self._tls is None and (self._token is None or not self._may_show_token(address)):
            return make_channel(address, max_message_bytes=max_message_bytes, silence=silence)

        def dial() -> grpc.aio.Channel:
            tls = None if self._tls is None else self._tls.channel_credentials()
            return make_channel(address, max_message_bytes=max_message_bytes, silence=silence, tls=tls, peer_name=self._peer_name)

        return SecureChannel(dial, version=self._version, metadata=self._metadata)

    def _may_show_token(self, address: Address | str) -> bool:
        """Over a connection without TLS."""
        try:
            if Address.parse(str(address)).is_local:
                return True
        except ValueError:  # What gRPC might make of it nobody knows.
            pass
        if str(address) not in self._warned and len(self._warned) < WARNINGS:
            self._warned.add(str(address))
            what = "travels readable to" if self._in_clear else "is kept back from"
            log.warning("the token %s %s, which is not on this host and is dialled without TLS", what, address)
        return self._in_clear

    def _version(self) -> int:
        return 0 if self._tls is None else self._tls.refresh()

    def _metadata(self) -> Metadata:
        return () if self._token is None else ((HEADER, SCHEME + self._token.presented),)


class Security:
    """Lives as long as the process: files are read again when they change."""

    def __init__(
        self,
        config: SecurityConfig,
        *,
        client_tokens: Path | None = None,
        operator_tokens: Path | None = None,
        max_calls_per_client: int | None = None,
    ) -> None:
        """client_tokens, operator_tokens: --auth-token-file and --operator-token-file, of a process that serves clients. Raises
        StartError on files that cannot be used."""
        tls = TlsFiles(cert=config.tls_cert, key=config.tls_key, ca=config.tls_ca) if config.has_tls else None
        workers = _tokens(config.worker_token_file, "--worker-token-file")
        clients = _tokens(client_tokens, "--auth-token-file")
        operators = _tokens(operator_tokens, "--operator-token-file")
        check_apart(file for file in (clients, workers, operators) if file is not None)
        self._max_message_bytes = config.max_message_mb * MIB
        self._max_metadata_bytes = config.max_metadata_kb * 1024
        self._credentials = Credentials(tls=tls, token=workers, peer_name=config.tls_peer_name, in_clear=config.insecure)
        self._server_credentials = None if tls is None else tls.server_credentials(mutual=config.is_mutual)
        gate = Gate(clients=clients, workers=workers, operators=operators, is_mutual=config.is_mutual, is_open=config.insecure)
        limit = None if max_calls_per_client is None else CallLimit(max_calls_per_client)
        self._auth = AuthInterceptor(gate, limit=limit)
        self._channelz = config.channelz
        self._has_tokens = not (clients is None and workers is None)

    def make_server(self, *, silence: timedelta = CLIENT_SILENCE) -> grpc.aio.Server:
        """Not yet listening: add services, bind(), then start(). silence: see common.rpc.server. Raises StartError if --channelz
        cannot be had."""
        server = make_server(
            max_message_bytes=self._max_message_bytes,
            max_metadata_bytes=self._max_metadata_bytes,
            silence=silence,
            interceptors=(self._auth,),
        )
        if self._channelz:
            _add_channelz(server)
        return server

    @property
    def services(self) -> tuple[str, ...]:
        """Those that make_server() has added."""
        return (CHANNELZ,) if self._channelz else ()

    async def bind(self, server: grpc.aio.Server, address: Address) -> Address:
        """See common.rpc.server.bind."""
        if not address.is_local and self._server_credentials is None:
            exposed = "tokens and everything else travel readable" if self._has_tokens else "anybody may call it"
            log.warning("listening on %s without TLS: %s", address, exposed)
        return await bind(server, address, credentials=self._server_credentials)

    def connect(self, address: Address | str, *, silence: timedelta = PEER_SILENCE) -> grpc.aio.Channel:
        """A connection of its own to a router or worker, made on first use and again when lost. The caller closes it.
        silence: see make_channel."""
        return self._credentials.connect(address, max_message_bytes=self._max_message_bytes, silence=silence)


def _add_channelz(server: grpc.aio.Server) -> None:
    try:
        from grpc_channelz.v1 import channelz
    except ImportError:
        raise StartError("--channelz needs the package grpcio-channelz") from None
    channelz.add_channelz_servicer(server)


def _tokens(path: Path | None, flag: str) -> TokenFile | None:
    return None if path is None else TokenFile(path, flag=flag)
