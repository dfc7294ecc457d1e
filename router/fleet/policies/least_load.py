"""least_load: where there is the least to do.

Prefill: the fewest prompt tokens still to compute, then the fewest requests. Decode: the least full (Worker.fullness), then the
most available pages. A worker that is a pair alone competes with the best pair of two by fullness, then by prompt tokens still to
compute, and loses a tie. Full ties go by id, so that an idle cluster keeps using the pair whose prefix cache is warm.
"""

from __future__ import annotations

from collections.abc import Sequence

from router.fleet.placement import Ask, Pair, Seats
from router.fleet.workers import Worker, least_full


def least_load(seats: Seats, ask: Ask, state: None = None) -> Pair:
    """A policy (router/fleet/policies) without a state."""
    if not ask.needs_decode:
        return Pair(least_queued(seats.firsts), None)
    pairs = [Pair(worker, worker) for worker in seats.alone]
    if seats.prefills:
        pairs.append(Pair(least_queued(seats.prefills), least_full(seats.decodes)))
    return min(pairs, key=_pair_load)


def with_decode(first: Worker, seats: Seats, ask: Ask) -> Pair:
    """The pair of a worker that computes the prompt with the least full decode worker, where it needs one."""
    if not ask.needs_decode:
        return Pair(first, None)
    return Pair(first, first if first.profile.local_prefill else least_full(seats.decodes))


def least_queued(workers: Sequence[Worker]) -> Worker:
    return min(workers, key=prefill_load)


def prefill_load(worker: Worker) -> tuple[int, int, str]:
    return worker.queued_tokens, worker.requests, worker.id


def _pair_load(pair: Pair) -> tuple[float, int, bool, str]:
    assert pair.decode is not None
    return pair.decode.fullness, pair.prefill.queued_tokens, pair.is_alone, pair.decode.id
