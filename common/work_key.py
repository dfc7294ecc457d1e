"""WorkKey: the name of one attempt at one completion, the same in every process."""

from __future__ import annotations

from typing import NamedTuple


class WorkKey(NamedTuple):
    """Names one attempt at one completion; workers key all their work by it."""

    router_epoch: int
    uid: int
    attempt: int

    def for_completion(self, offset: int) -> WorkKey:
        """The key of the offset-th of n completions: they hold consecutive uids."""
        return self._replace(uid=self.uid + offset)

    def __str__(self) -> str:
        return f"{self.router_epoch:016x}/{self.uid}/{self.attempt}"
