"""What client programs are told of TLS and tokens."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from common.errors import StartError
from common.rpc.client_options import ClientOptions, add_client_options
from tests.helpers.secrets import Secrets


def options(*argv: str) -> ClientOptions:
    parser = argparse.ArgumentParser()
    add_client_options(parser)
    return ClientOptions.of(parser.parse_args(argv))


def test_without_options_it_is_in_clear() -> None:
    given = options()
    assert (given.tls, given.token) == (None, None)
    assert given.grpcurl() == ["-plaintext"]


def test_everything_is_passed_on_and_the_token_can_be_hidden(tmp_path: Path) -> None:
    secrets = Secrets(tmp_path, tls=True, tokens=True)
    ca, cert, key = map(str, (secrets.ca, secrets.cert, secrets.key))
    given = options(f"--tls-ca={ca}", f"--tls-cert={cert}", f"--tls-key={key}", f"--token-file={secrets.clients}")
    files = ["-cacert", ca, "-cert", cert, "-key", key]
    assert given.grpcurl() == [*files, "-H", f"authorization: Bearer {secrets.client_token}"]
    assert given.grpcurl(show=lambda token: "...") == [*files, "-H", "authorization: Bearer ..."]


def test_tls_with_the_system_s_authorities(tmp_path: Path) -> None:
    given = options("--tls")
    assert given.tls is not None and given.grpcurl() == []


def test_what_cannot_work_is_said(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="--token-file /no/file does not exist"):
        options("--token-file=/no/file")
    with pytest.raises(ValueError, match="--tls-cert and --tls-key must be given together"):
        options("--tls-cert=/c")
    with pytest.raises(ValueError, match="must be host:port"):
        options().connect("nowhere")


def test_variables_say_the_same_and_flags_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = Secrets(tmp_path, tls=True, tokens=True)
    monkeypatch.setenv("PDSERVE_TLS_CA", str(secrets.ca))
    monkeypatch.setenv("PDSERVE_TOKEN_FILE", "/no/file")
    with pytest.raises(StartError, match="--token-file /no/file does not exist"):
        ClientOptions.from_environment()
    given = options(f"--token-file={secrets.clients}")
    assert given.grpcurl()[:2] == ["-cacert", str(secrets.ca)]
    assert given.token is not None and given.token.presented == secrets.client_token
