"""Which prefill and which decode worker get a request, or which worker that does both: a function of values.

Prefill: the fewest prompt tokens still to compute, then the fewest requests. Decode: the fewest requests per place in its batch,
then the most available pages. A worker with local_prefill is a pair alone and no part of another; it competes with the best pair
of two by requests per place, then by prompt tokens still to compute, and loses a tie. All is corrected by what this router has
sent since the worker's last report; ties go by id, so that an idle cluster keeps using the pair whose prefix cache is warm.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from router.workers import Worker


class Ask(NamedTuple):
    """What a request needs.

    pages: that its prompt and whole output take in either pool.
    needs_decode: False if the prefill worker makes its only token.
    avoid: ids of workers that failed earlier attempts; used again only if there is nobody else.
    """

    pages: int
    needs_decode: bool = True
    avoid: frozenset[str] = frozenset()


class Pair(NamedTuple):
    """decode is None if none is needed, and the same worker as prefill if that does both."""

    prefill: Worker
    decode: Worker | None

    @property
    def is_alone(self) -> bool:
        return self.decode is self.prefill

    @property
    def ids(self) -> frozenset[str]:
        return frozenset(worker.id for worker in self if worker is not None)


def choose(workers: Sequence[Worker], ask: Ask) -> Pair | None:
    """None while there is no placeable worker of a needed role whose pool can hold the request."""
    usable = [worker for worker in workers if worker.is_placeable and worker.profile.total_pages >= ask.pages]
    alone = [worker for worker in usable if worker.profile.local_prefill]
    prefills = [worker for worker in usable if worker.role == "prefill"]
    decodes = [worker for worker in usable if worker.role == "decode" and not worker.profile.local_prefill]
    if not ask.needs_decode:
        firsts = sorted([*prefills, *alone], key=lambda worker: (worker.id in ask.avoid, *_prefill_load(worker)))
        return Pair(firsts[0], None) if firsts else None
    pairs = [Pair(worker, worker) for worker in alone]
    if prefills and decodes:
        prefill = min(prefills, key=lambda worker: (worker.id in ask.avoid, *_prefill_load(worker)))
        pairs.append(Pair(prefill, min(decodes, key=lambda worker: (worker.id in ask.avoid, *_decode_load(worker)))))
    return min(pairs, key=lambda pair: (bool(pair.ids & ask.avoid), *_pair_load(pair)), default=None)


def _requests(worker: Worker) -> int:
    return worker.load.running + worker.load.waiting + worker.sent.requests


def _prefill_load(worker: Worker) -> tuple[int, int, str]:
    return worker.load.queued_tokens + worker.sent.tokens, _requests(worker), worker.id


def _decode_load(worker: Worker) -> tuple[float, int, str]:
    available = worker.load.pages.free + worker.load.pages.cached - worker.sent.pages
    return _requests(worker) / max(1, worker.profile.max_running), -available, worker.id


def _pair_load(pair: Pair) -> tuple[float, int, bool, int, str]:
    assert pair.decode is not None
    share, scarcity, worker_id = _decode_load(pair.decode)
    return share, _prefill_load(pair.prefill)[0], pair.is_alone, scarcity, worker_id
