"""How many tokens a request may make, from what the context leaves and the pools can ever hold: functions of values.

0            prompt_len                 prompt_len + output_len
| prompt      | output at most           |      <= max_context, and in pages <= a pair's smaller pool
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from common.engine.pages import pages_for
from common.errors import OutOfRange
from router.fleet.workers import Worker


@dataclass(frozen=True)
class Capacity:
    """What the profiles of the registered workers allow. max_context: the smallest, in tokens; page_size: everybody's; None
    without workers. pair_pages: see the function; None while there is no pair."""

    max_context: int | None
    page_size: int | None
    pair_pages: int | None

    @classmethod
    def of(cls, workers: Sequence[Worker]) -> Capacity:
        shared = [worker.profile.compatibility for worker in workers]
        context = min((each.max_context for each in shared), default=None)
        return cls(context, shared[0].page_size if shared else None, pair_pages(workers))


def pair_pages(workers: Sequence[Worker]) -> int | None:
    """Pages of the best registered pair's smaller pool, or of the best worker that is a pair alone; None while there is none."""
    alone = [worker.profile.total_pages for worker in workers if worker.profile.local_prefill]
    prefills = [worker.profile.total_pages for worker in workers if worker.role == "prefill"]
    decodes = [worker.profile.total_pages for worker in workers if worker.role == "decode" and not worker.profile.local_prefill]
    return max([*alone, *([min(max(prefills), max(decodes))] if prefills and decodes else [])], default=None)


def output_limit(
    *, prompt_len: int, max_tokens: int, max_tokens_given: bool, max_context: int, page_size: int, pool_pages: int
) -> int:
    """Output tokens at most, >= 1.

    max_tokens beyond the context is cut to it. Beyond the pools it is refused if the client gave it and cut if not.
    Raises OutOfRange for what no pair's pools can ever hold.
    """
    wanted = min(max_tokens, max_context - prompt_len)
    fitting = pool_pages * page_size - prompt_len
    if wanted <= fitting:
        return wanted
    if fitting < 1 or max_tokens_given:
        wanted = wanted if max_tokens_given else 1
        pages = pages_for(prompt_len + wanted, page_size)
        rule = f"with the prompt's {prompt_len} tokens must fit in {pool_pages} pages of {page_size} tokens ({pages} needed)"
        raise OutOfRange("max_tokens", rule, wanted)
    return fitting


def group_pages(*, prompt_len: int, n: int, page_size: int) -> int:
    """Pages a decode worker reserves for n completions: the prompt's, n to grow into, n - 1 copies of a partial last one."""
    return pages_for(prompt_len, page_size) + n + (n - 1)
