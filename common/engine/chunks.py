"""The chunk planner: which prompts compute how many tokens in the next prefill step."""

from __future__ import annotations

from collections.abc import Sequence

from common.core import Req

OLDEST_SHARE = 4
"""The oldest request gets at least 1/OLDEST_SHARE of every step, so that it ends in bounded time however many short ones come."""


def plan_chunks(reqs: Sequence[Req], *, budget_tokens: int) -> list[tuple[Req, int]]:
    """Shares one step's budget: shortest remaining prompt first, with a guaranteed share for the oldest.

    reqs: in order of arrival, each with tokens left to compute past cached_len. Higher priority goes before shorter.
    Returns (req, tokens >= 1) pairs whose tokens sum to at most budget_tokens (>= 1); never empty while reqs is not.
    Shortest-first minimises the mean time to first token (SRPT); the share bounds the longest prompt's wait.
    """
    if not reqs:
        return []
    oldest = reqs[0]
    shares = {oldest: min(remaining(oldest), max(1, budget_tokens // OLDEST_SHARE))}
    left = budget_tokens - shares[oldest]
    for req in sorted(reqs, key=lambda req: (-req.priority, remaining(req), req.uid)):
        more = min(remaining(req) - shares.get(req, 0), left)
        if more > 0:
            shares[req] = shares.get(req, 0) + more
            left -= more
    return [(req, shares[req]) for req in reqs if req in shares]


def remaining(req: Req) -> int:
    """Known tokens whose KV is not computed."""
    return len(req.input_ids) - req.cached_len
