"""TokenFile: what is read, refused and read again."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

import pytest

from common.errors import StartError
from common.rpc.tokens import TokenFile, check_apart, parse_tokens

OLD, NEW = "old-" + "x" * 30, "new-" + "x" * 30


def write(path: Path, text: str) -> None:
    """As a careful administrator does: whole or not at all."""
    scratch = path.with_suffix(".next")
    scratch.write_text(text)
    scratch.chmod(0o600)
    scratch.replace(path)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write(tmp_path / "tokens", f"# ours\n\n{OLD}\n  team-a  {NEW}\n")
    return tmp_path / "tokens"


def test_every_token_is_found_and_the_first_is_presented(path: Path) -> None:
    tokens = TokenFile(path, flag="--auth-token-file")
    assert tokens.presented == OLD
    found = tokens.find(OLD), tokens.find(NEW)
    assert [token and token.name for token in found] == ["line 3", "team-a"]
    assert tokens.find(OLD[:-1]) is tokens.find("") is tokens.find(OLD + "x") is tokens.find("\udcff") is None


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "has no token in it"),
        ("# nothing\n\n", "has no token in it"),
        ("a b c\n", "must have a token or a name and a token on a line, line 1 has 3 words"),
        ("good-token\nschlüssel\n", "must have tokens of at most 4096 printable ASCII characters, see line 2"),
        ("x" * 5000, "must have tokens of at most 4096 printable ASCII characters, see line 1"),
        ("good-token #ours\n", "must have comments on lines of their own, see line 1"),
        ("team-a good-token\nteam-b good-token\n", "must have each token once, line 2 repeats an earlier one"),
        ("\ufeff# only a comment\n", "has no token in it"),
    ],
)
def test_a_file_without_usable_tokens_is_a_start_error_that_names_flag_file_and_line(tmp_path: Path, text: str, why: str) -> None:
    write(tmp_path / "tokens", text)
    with pytest.raises(StartError) as caught:
        TokenFile(tmp_path / "tokens", flag="--auth-token-file")
    assert str(caught.value) == f"--auth-token-file {tmp_path / 'tokens'} {why}"
    assert "schlüssel" not in str(caught.value) and "good-token" not in str(caught.value)


@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r", " \t\r\n"])
def test_what_editors_add_is_part_of_no_token(tmp_path: Path, mark: str, end: str) -> None:
    """A byte order mark before "# ours" once made a token of "ours"."""
    (path := tmp_path / "tokens").write_bytes(f"{mark}# ours{end}{OLD}{end}{end}\tteam-a\t{NEW}{end}".encode())
    assert [(token.name, token.text) for token in parse_tokens(path.read_bytes())] == [("line 2", OLD), ("team-a", NEW)]
    assert [token.text for token in parse_tokens(f"{mark}{OLD}{end}".encode())] == [OLD]


def test_a_file_as_some_shells_write_it_is_refused() -> None:
    with pytest.raises(ValueError, match="must have tokens of at most 4096 printable ASCII characters, see line 1"):
        parse_tokens(OLD.encode("utf-16"))


def test_files_of_different_kinds_share_no_token(path: Path, tmp_path: Path) -> None:
    write(tmp_path / "others", f"team-b {NEW}\n")
    write(tmp_path / "apart", "something-else-that-is-long\n")
    mine, others, apart = (TokenFile(file, flag=f"--{file.name}") for file in (path, tmp_path / "others", tmp_path / "apart"))
    check_apart([mine, apart])
    with pytest.raises(StartError, match="--tokens .* and --others .* must have no token in common, that of team-a is in both"):
        check_apart([apart, mine, others])


def test_a_missing_file_and_a_folder_are_start_errors(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="--worker-token-file .*/none does not exist"):
        TokenFile(tmp_path / "none", flag="--worker-token-file")
    with pytest.raises(StartError, match="cannot be read: is a directory"):
        TokenFile(tmp_path, flag="--worker-token-file")


def test_a_changed_file_is_read_again_and_a_removed_token_is_refused(path: Path) -> None:
    tokens = TokenFile(path, flag="--auth-token-file")
    write(path, NEW)
    assert tokens.find(OLD) is None
    assert tokens.find(NEW) is not None and tokens.presented == NEW


@pytest.mark.parametrize("how", ["empty", "missing"])
def test_a_change_that_cannot_be_read_leaves_the_last_good_tokens_and_is_logged_once(
    path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = TokenFile(path, flag="--auth-token-file")
    if how == "empty":
        write(path, "")
    else:
        path.unlink()
    for _ in range(3):
        assert tokens.find(OLD) is not None
    assert len([record for record in caplog.records if record.levelno == logging.ERROR]) == 1
    assert OLD not in caplog.text
    write(path, NEW)
    assert tokens.find(OLD) is None and tokens.find(NEW) is not None


def test_a_file_that_becomes_readable_later_is_read_then(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written by an administrator for himself alone, and given to us a moment after: what is in it does not change by that."""
    tokens = TokenFile(path, flag="--auth-token-file")

    def refuse(path: Path) -> bytes:
        raise PermissionError(errno.EACCES, "Permission denied")

    write(path, NEW)
    with monkeypatch.context() as patched:
        patched.setattr("common.rpc.tokens.read_small", refuse)
        assert tokens.presented == OLD
    path.chmod(0o640)
    assert tokens.presented == NEW and tokens.find(OLD) is None


def test_a_pipe_is_read_once_and_one_without_a_writer_or_an_end_is_a_start_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--auth-token-file <(vault read ...): read again, at the first call, it held up everything."""
    monkeypatch.setattr("common.rpc.tokens.START_SECONDS", 0.2)
    os.mkfifo(path := tmp_path / "pipe")
    with pytest.raises(StartError, match="--auth-token-file .*/pipe cannot be read: it is a pipe whose writer has not ended"):
        TokenFile(path, flag="--auth-token-file")
    reader, writer = os.pipe()
    os.write(writer, OLD.encode())
    os.close(writer)
    tokens = TokenFile(Path(f"/dev/fd/{reader}"), flag="--auth-token-file")
    assert tokens.find(OLD) is not None and tokens.presented == OLD
    os.close(reader)
    with pytest.raises(StartError, match="--auth-token-file /dev/zero must have at most 8388608 bytes"):
        TokenFile(Path("/dev/zero"), flag="--auth-token-file")


def test_a_file_that_every_user_can_read_and_a_short_token_are_warned_of(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path.write_text("short")
    path.chmod(0o644)
    TokenFile(path, flag="--auth-token-file")
    assert f"--auth-token-file {path} can be read by every user of this host (mode 0644): chmod 600" in caplog.text
    assert "1 of its tokens have fewer than 16 characters" in caplog.text and "short" not in caplog.text.replace("tokens of", "")


def test_a_file_of_its_owner_alone_is_not_warned_of(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    TokenFile(path, flag="--auth-token-file")
    assert caplog.text == ""


def test_tokens_are_compared_by_digest_in_constant_time(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each candidate is compared with every token, by hmac.compare_digest and nothing else."""
    import hmac

    compared: list[tuple[bytes, bytes]] = []
    real = hmac.compare_digest

    def compare(ours: bytes, theirs: bytes) -> bool:
        compared.append((ours, theirs))
        return real(ours, theirs)

    monkeypatch.setattr(hmac, "compare_digest", compare)
    tokens = TokenFile(path, flag="--auth-token-file")
    for text in (OLD, NEW, "neither"):
        tokens.find(text)
    assert len(compared) == 6 and all(len(ours) == len(theirs) == 32 for ours, theirs in compared)


def test_names_and_tokens_keep_their_places() -> None:
    assert [(token.name, token.text) for token in parse_tokens(b"one aaaa\nbbbb\n")] == [("one", "aaaa"), ("line 2", "bbbb")]


def test_a_file_that_keeps_its_time_but_not_its_size_is_read_again(path: Path) -> None:
    tokens = TokenFile(path, flag="--auth-token-file")
    times = path.stat()
    path.write_text(NEW + "\n")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert tokens.find(OLD) is None
