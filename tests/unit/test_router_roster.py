"""The roster says of every request what is said of it by looking at all workers anew."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.fleet.placement import Ask, seats_for
from router.fleet.roster import Roster
from router.fleet.workers import Worker
from tests.helpers.workers import worker

pytestmark = pytest.mark.unit

WORKERS = st.tuples(st.sampled_from(["prefill", "decode", "alone"]), st.integers(1, 4), st.booleans())
AVOIDED = st.frozensets(st.sampled_from(["0", "1", "2"]))
ASKS = st.tuples(st.integers(0, 5), st.booleans(), AVOIDED).map(lambda ask: Ask(ask[0], needs_decode=ask[1], avoid=ask[2]))


def made(number: int, kind: str, pages: int, *, session: bool) -> Worker:
    role = "prefill" if kind == "prefill" else "decode"
    return worker(str(number), role, pages=pages, session=session, alone=kind == "alone")  # type: ignore[arg-type]


@settings(deadline=None)
@given(st.lists(WORKERS, max_size=6), st.lists(ASKS, min_size=1, max_size=6))
def test_seats_are_the_same_as_without_a_roster(kinds: list[tuple[str, int, bool]], asks: list[Ask]) -> None:
    workers = [made(i, kind, pages, session=session) for i, (kind, pages, session) in enumerate(kinds)]
    roster = Roster(workers)
    for ask in asks:
        assert roster.seats(ask) == seats_for(workers, ask)
