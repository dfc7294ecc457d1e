"""Report: what a request's journey tells its router."""

from __future__ import annotations

from typing import Protocol

from common.work import TokenOut, WorkFailure
from common.work_key import WorkKey


class Report(Protocol):
    """Event loop; must not block; telling somebody who has gone is no error."""

    def started(self, key: WorkKey, *, cached_tokens: int) -> None:
        """Prefill has begun."""

    def first_token(self, token: TokenOut) -> None:
        """One per completion."""

    def handed_off(self, key: WorkKey) -> None:
        """The decode worker runs this completion now."""

    def failed(self, failure: WorkFailure) -> None:
        """The attempt at this completion has ended without."""
