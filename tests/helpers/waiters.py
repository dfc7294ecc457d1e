"""Waiters for tests of the line: they note what becomes of them."""

from __future__ import annotations

from itertools import count

from common.errors import PdserveError
from router.fleet.placement import Ask, Pair
from router.queueing.waiter import Waiter

_uids = count(1)


class Fate:
    """went: the pair; error: the refusal; neither while it waits."""

    went: Pair | None = None
    error: PdserveError | None = None


def waiter(
    tokens: int = 10,
    *,
    output_tokens: int = 1,
    tenant: str = "",
    priority: int = 0,
    pages: int = 1,
    pool: int = 1,
    deadline: float | None = None,
    is_begun: bool = False,
    ask: Ask | None = None,
) -> tuple[Waiter, Fate]:
    """pages: to begin with; pool: of its whole life. Uids rise from call to call."""
    fate = Fate()

    def go(pair: Pair) -> None:
        assert fate.went is None and fate.error is None
        fate.went = pair

    def refuse(error: PdserveError) -> None:
        assert fate.went is None and fate.error is None
        fate.error = error

    made = Waiter(
        ask or Ask(pool),
        uid=next(_uids),
        priority=priority,
        tenant=tenant,
        tokens=tokens,
        output_tokens=output_tokens,
        pages=pages,
        deadline=deadline,
        go=go,
        refuse=refuse,
        is_begun=is_begun,
    )
    return made, fate
