"""The first token of each completion of a prompt that is computed."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from common.core import Req
from common.engine.finish import finish_reason
from common.engine.runner import Sampled
from common.work import TokenOut


def take_first_tokens(
    req: Req, sampled: Sequence[Sampled], eos_token_ids: Collection[int], *, cached_tokens: int
) -> tuple[TokenOut, ...]:
    """Appends the first completion's token to req (complete_one done) and returns one token per completion, in order of uid.

    Whether a token ends its completion depends on the token and on lengths, which all of them share.
    """
    index = req.num_output
    req.append_id(sampled[0].token_id)
    return tuple(
        TokenOut(
            key=req.key.for_completion(offset),
            index=index,
            token_id=one.token_id,
            logprob=one.logprob,
            top=one.top,
            finish=finish_reason(req, one.token_id, eos_token_ids),
            cached_tokens=cached_tokens,
        )
        for offset, one in enumerate(sampled)
    )
