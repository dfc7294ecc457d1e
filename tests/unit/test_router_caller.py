"""What a call says of itself beside its message."""

from __future__ import annotations

from typing import Any

import pytest

from router.caller import MAX_NAME_CHARS, Caller, CallerKeys, check_key

pytestmark = pytest.mark.unit

KEYS = CallerKeys(session="x-session-id", tenant="x-tenant-id")


def of(metadata: list[tuple[str, Any]], *, time_left: float | None = None) -> Caller:
    return Caller.of(metadata, KEYS, now=100.0, time_left=time_left)


def test_a_caller_that_says_nothing_has_no_session_and_no_deadline() -> None:
    assert of([]) == Caller(100.0, None, session="", tenant="")


def test_session_and_tenant_are_read_and_the_deadline_is_counted_from_now() -> None:
    metadata = [("other", "b"), ("x-session-id", "a"), ("x-tenant-id", "t")]
    assert of(metadata, time_left=2.5) == Caller(100.0, 102.5, session="a", tenant="t")


def test_bytes_are_no_name_and_long_names_are_cut() -> None:
    assert of([("x-session-id", b"a")]).session == ""
    assert of([("x-session-id", "a" * 1000)]).session == "a" * MAX_NAME_CHARS


@pytest.mark.parametrize("key", ["", "X-Session", "a b", "x-bin", "grpc-timeout", "ä"])
def test_what_cannot_be_a_metadata_key_is_refused_at_start(key: str) -> None:
    with pytest.raises(ValueError, match="--session-key must be a metadata key"):
        check_key("--session-key", key)
