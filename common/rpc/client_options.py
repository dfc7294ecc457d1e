"""How a client program is told of TLS and its token: the same flags and variables (PDSERVE_TOKEN_FILE) for each of them."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import grpc

from common.address import Address
from common.config import ENV_PREFIX
from common.rpc.auth import HEADER, SCHEME
from common.rpc.channels import PEER_SILENCE
from common.rpc.security import Credentials
from common.rpc.server import MAX_MESSAGE_BYTES
from common.rpc.tls import TlsFiles
from common.rpc.tokens import TokenFile

FILES = {
    "tls-ca": "authorities in PEM that the router's certificate is verified with; means --tls",
    "tls-cert": "certificate to show, where the router asks for one (mutual TLS)",
    "tls-key": "its key",
    "token-file": "file whose first token is shown to the router",
}


def add_client_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("security of the connection")
    group.add_argument("--tls", action="store_true", help="speak TLS, with the system's authorities unless --tls-ca is given")
    for name, help in FILES.items():
        variable = ENV_PREFIX + name.replace("-", "_").upper()
        default = os.environ.get(variable)
        group.add_argument(f"--{name}", type=Path, default=default and Path(default), help=f"{help} ({variable})")


class ClientOptions(NamedTuple):
    """tls: None: in clear."""

    tls: TlsFiles | None
    token: TokenFile | None
    arguments: argparse.Namespace

    @classmethod
    def from_environment(cls) -> ClientOptions:
        """What the variables say. Raises as of() does."""
        parser = argparse.ArgumentParser()
        add_client_options(parser)
        return cls.of(parser.parse_args([]))

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> ClientOptions:
        """Raises StartError on files that cannot be used, ValueError on flags that do not go together."""
        if (arguments.tls_cert is None) != (arguments.tls_key is None):
            raise ValueError("--tls-cert and --tls-key must be given together")
        wants_tls = arguments.tls or arguments.tls_ca is not None or arguments.tls_cert is not None
        tls = TlsFiles(cert=arguments.tls_cert, key=arguments.tls_key, ca=arguments.tls_ca) if wants_tls else None
        token = None if arguments.token_file is None else TokenFile(arguments.token_file, flag="--token-file")
        return cls(tls, token, arguments)

    def connect(self, address: str, *, silence: timedelta = PEER_SILENCE) -> grpc.aio.Channel:
        """The caller closes it. silence: see make_channel. Raises ValueError on what is no address."""
        credentials = Credentials(tls=self.tls, token=self.token, in_clear=True)  # With a warning: a user says whom to call.
        return credentials.connect(Address.parse(address), max_message_bytes=MAX_MESSAGE_BYTES, silence=silence)

    def grpcurl(self, *, show: Callable[[str], str] = str) -> list[str]:
        """The same as options of grpcurl. show: what stands for the token."""
        given = (("-cacert", self.arguments.tls_ca), ("-cert", self.arguments.tls_cert), ("-key", self.arguments.tls_key))
        options = [word for flag, path in given if path is not None for word in (flag, str(path))]
        if self.tls is None:
            options = ["-plaintext"]
        if self.token is not None:
            options += ["-H", f"{HEADER}: {SCHEME}{show(self.token.presented)}"]
        return options
