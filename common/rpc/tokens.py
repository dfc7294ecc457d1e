"""TokenFile: the tokens that a process accepts or presents, read again when the file changes.

    # comments and empty lines are skipped
    k7Vr0w...                      a token
    team-a  b3Jkg2...              a token with a name, for logs and limits per client

The first token is the one that is presented, all are accepted. To rotate: add the new one below, move it up, drop the old one.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
from collections.abc import Iterable
from itertools import combinations
from pathlib import Path
from typing import Final, NamedTuple

from common.errors import StartError
from common.file_stamp import FileStamp
from common.small_file import START_SECONDS, read_small

SHORT_TOKEN_CHARS: Final = 16
MAX_TOKEN_CHARS: Final = 4096
log = logging.getLogger(__name__)


class Token(NamedTuple):
    """digest: SHA-256 of the text, which is what is compared. name: who has it, for logs: never a part of the text. holder: the
    same for all tokens of one name, and for a token without a name wherever in the file it is."""

    text: str
    digest: bytes
    name: str
    holder: str


class TokenFile:
    """flag: what the file was given with, for messages. Once read, a change that cannot be read leaves the last good tokens in
    force and is logged once."""

    def __init__(self, path: Path, *, flag: str) -> None:
        """Raises StartError if no token can be read from it."""
        self._path = path
        self._flag = flag
        self._stamp: FileStamp | None = None
        try:
            self._stamp = stamp = FileStamp.of(path)
            self._tokens = parse_tokens(read_small(path, patience_seconds=START_SECONDS))
        except (OSError, ValueError) as error:
            raise StartError(f"{flag} {path} {_reason(error)}") from error
        self._warn(stamp)

    @property
    def presented(self) -> str:
        """The token to show to others."""
        self._refresh()
        return self._tokens[0].text

    def find(self, text: str) -> Token | None:
        """The accepted token that equals text. Takes the same time whichever it is, and whether there is one."""
        self._refresh()
        digest = _digest(text)
        found = None
        for token in self._tokens:
            if hmac.compare_digest(token.digest, digest):
                found = token
        return found

    def has(self, token: Token) -> bool:
        """Whether it is one of these."""
        return token in self._tokens

    def shared_with(self, other: TokenFile) -> str | None:
        """The name, here, of a token that both files have."""
        theirs = {token.digest for token in other._tokens}
        return next((token.name for token in self._tokens if token.digest in theirs), None)

    def __str__(self) -> str:
        return f"{self._flag} {self._path}"

    def _refresh(self) -> None:
        """One stat() a call: some microseconds, and nobody waits for a new token."""
        try:
            stamp = FileStamp.of(self._path)
        except OSError as error:
            self._keep(None, error)
            return
        if stamp == self._stamp:
            return
        try:
            self._tokens = parse_tokens(read_small(self._path))
        except (OSError, ValueError) as error:
            self._keep(stamp, error)
            return
        self._stamp = stamp
        log.info("%s %s has changed: %d tokens", self._flag, self._path, len(self._tokens))
        self._warn(stamp)

    def _keep(self, stamp: FileStamp | None, error: Exception) -> None:
        if stamp != self._stamp:
            self._stamp = stamp
            log.error("%s %s has changed and %s: the tokens before hold", self._flag, self._path, _reason(error))

    def _warn(self, stamp: FileStamp) -> None:
        if stamp.is_open_to_all:
            log.warning("%s %s can be read by every user of this host (mode %04o): chmod 600", self._flag, self._path, stamp.mode)
        if short := sum(len(token.text) < SHORT_TOKEN_CHARS for token in self._tokens):
            # Without a name: where name and token have changed places it is the token.
            log.warning("%s %s: %d of its tokens have fewer than %d characters", self._flag, self._path, short, SHORT_TOKEN_CHARS)


def check_apart(files: Iterable[TokenFile]) -> None:
    """Raises StartError if a token is in two of them: each kind opens other doors."""
    for one, other in combinations(files, 2):
        if (name := one.shared_with(other)) is not None:
            raise StartError(f"{one} and {other} must have no token in common, that of {name} is in both")


def parse_tokens(data: bytes) -> list[Token]:
    """At least one. Raises ValueError naming the line and what is wrong with it, never its text."""
    tokens: dict[bytes, Token] = {}
    # utf-8-sig: behind the mark that some editors begin a file with, a comment would be a name and a token.
    for number, line in enumerate(data.decode("utf-8-sig", errors="replace").splitlines(), start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        text = words[-1]
        if len(words) > 2:
            raise ValueError(f"must have a token or a name and a token on a line, line {number} has {len(words)} words")
        if not (text.isascii() and text.isprintable()) or len(text) > MAX_TOKEN_CHARS:
            raise ValueError(f"must have tokens of at most {MAX_TOKEN_CHARS} printable ASCII characters, see line {number}")
        if text.startswith("#"):
            raise ValueError(f"must have comments on lines of their own, see line {number}")
        if (digest := _digest(text)) in tokens:
            raise ValueError(f"must have each token once, line {number} repeats an earlier one")
        name = words[0] if len(words) == 2 else ""
        tokens[digest] = Token(text, digest, name or f"line {number}", holder=name or digest.hex())
    if not tokens:
        raise ValueError("has no token in it")
    return list(tokens.values())


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode(errors="surrogatepass")).digest()


def _reason(error: Exception) -> str:
    """Follows the file's name."""
    if isinstance(error, FileNotFoundError):
        return "does not exist"
    return f"cannot be read: {(error.strerror or str(error)).lower()}" if isinstance(error, OSError) else str(error)
