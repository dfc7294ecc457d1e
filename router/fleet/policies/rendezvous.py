"""Which worker a key belongs to: rendezvous hashing with bounded loads, so that routers agree without talking.

Every worker has a pseudo-random weight for every key; the key goes to the heaviest (Thaler and Ravishankar, "Using Name-Based
Mappings to Increase Hit Rates", IEEE/ACM ToN 6(1), 1998). A worker that leaves gives away its own keys and moves no others. A
worker loaded beyond a bound is passed over for the next one (Mirrokni, Thorup and Zadimoghaddam, "Consistent Hashing with Bounded
Loads", SODA 2018), so that one popular key does not sink its worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from hashlib import blake2b

BALANCE = 1.25
"""How much more than the mean a worker may have: 1 + epsilon of the bounded-loads paper, which suggests 1.25 to 2."""


def weight(key: bytes, worker_id: str) -> int:
    """64 bits, the same in every process."""
    return int.from_bytes(blake2b(key, key=_digest(worker_id), digest_size=8).digest())


@lru_cache(maxsize=4096)  # For each request every worker's is needed.
def _digest(worker_id: str) -> bytes:
    return blake2b(worker_id.encode(), digest_size=16).digest()


def bound(loads: Mapping[str, float], *, added: float, floor: float) -> float:
    """Up to which load a worker may be given more: BALANCE times what the mean will be with `added`. Up to floor a worker counts
    as idle. The least loaded worker is always within, for it is not above the mean."""
    return max(floor, BALANCE * (sum(loads.values()) + added) / len(loads))


def within(loads: Mapping[str, float], *, added: float, floor: float) -> set[str]:
    """Ids of the workers that may be given more."""
    most = bound(loads, added=added, floor=floor)
    return {worker_id for worker_id, load in loads.items() if load <= most}


def home_of(key: bytes, loads: Mapping[str, float], *, added: float, floor: float) -> str:
    """The heaviest of those within the bound. loads: at least one."""
    return heaviest(key, within(loads, added=added, floor=floor))


def heaviest(key: bytes, worker_ids: Iterable[str]) -> str:
    return max(worker_ids, key=lambda worker_id: (weight(key, worker_id), worker_id))
