"""prefix: where most of the prompt is probably cached, weighed against who is how busy.

Both in prompt tokens: a worker's cost is what it has still to compute plus what it would have to compute of this prompt. A prefix
has a home by rendezvous hashing of its first blocks (router/fleet/policies/rendezvous.py), which is credited with a block unseen:
so routers that know nothing of each other's requests, or nothing yet, send equal prefixes to the same worker. Whoever is loaded
beyond the bound gets none. Decode workers are chosen by load alone: what they have cached saves copying, not computing.
"""

from __future__ import annotations

from router.fleet.placement import Ask, Pair, Seats
from router.fleet.policies.least_load import least_load, with_decode
from router.fleet.policies.rendezvous import heaviest, within
from router.fleet.policies.session import IDLE_TOKENS
from router.fleet.prefix_map import PrefixMap
from router.fleet.prompt_blocks import block_tokens
from router.fleet.workers import Worker

KEY_TOKENS = 256
"""Leading tokens, at most, that say where a prefix is at home."""
CREDIT_BLOCKS = 1
"""Blocks that a home is supposed to have, unseen: enough to be preferred among equals, and no more, for most prompts are new."""


def prefix(seats: Seats, ask: Ask, state: PrefixMap) -> Pair:
    """A policy (router/fleet/policies)."""
    tokens = block_tokens(seats.firsts[0].profile.compatibility.page_size)
    blocks = ask.prompt.names(tokens=tokens)
    if not blocks:
        return least_load(seats, ask)
    key_blocks = max(1, min(len(blocks), KEY_TOKENS // tokens))
    allowed = within({w.id: w.queued_tokens for w in seats.firsts}, added=len(ask.prompt), floor=IDLE_TOKENS)
    home = heaviest(blocks[key_blocks - 1], allowed)

    def cost(worker: Worker) -> tuple[int, bool, str]:
        cached = max(state.matched(worker.id, blocks), CREDIT_BLOCKS if worker.id == home else 0)
        return worker.queued_tokens - cached * tokens, worker.id != home, worker.id

    first = min((worker for worker in seats.firsts if worker.id in allowed), key=cost)
    return with_decode(first, seats, ask)


def after_prefix(pair: Pair, ask: Ask, state: PrefixMap) -> PrefixMap:
    """The same map, which has taken note of where the prompt has gone."""
    pool = pair.prefill.profile
    tokens = block_tokens(pool.compatibility.page_size)
    capacity = pool.total_pages * pool.compatibility.page_size // tokens
    state.note(pair.prefill.id, ask.prompt.names(tokens=tokens), capacity=capacity)
    return state
