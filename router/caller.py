"""Who calls, and how long they wait: what a call says of itself beside its message."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

MAX_NAME_CHARS = 256


@dataclass(frozen=True)
class CallerKeys:
    """The metadata keys to look at."""

    session: str
    tenant: str


@dataclass(frozen=True)
class Caller:
    """arrived_at, deadline: time.monotonic() seconds; no deadline: None. client: whose request it is, as the token says. session:
    names what belongs together, tenant: whom to be fair to, traceparent: the caller's span (W3C). "" for none."""

    arrived_at: float
    deadline: float | None = None
    client: str = ""
    session: str = ""
    tenant: str = ""
    traceparent: str = ""

    @classmethod
    def of(
        cls,
        metadata: Iterable[tuple[str, str | bytes]],
        keys: CallerKeys,
        *,
        now: float,
        time_left: float | None,
        client: str = "",
    ) -> Caller:
        """time_left: seconds. Longer names are cut to MAX_NAME_CHARS; of several values of one key the last counts."""
        names = {key: value[:MAX_NAME_CHARS] for key, value in metadata if isinstance(value, str)}
        deadline = None if time_left is None else now + time_left
        session, tenant = names.get(keys.session, ""), names.get(keys.tenant, "")
        return cls(now, deadline, client, session=session, tenant=tenant, traceparent=names.get("traceparent", ""))


def check_key(flag: str, key: str) -> None:
    """Raises ValueError unless key can be a metadata key with text for a value."""
    if re.fullmatch(r"[a-z0-9_.-]+", key) is None or key.endswith("-bin") or key.startswith("grpc-"):
        raise ValueError(
            f"{flag} must be a metadata key for text: of a-z 0-9 _ . -, without grpc- in front or -bin at its end, got {key!r}"
        )
