"""When a completion ends. Both workers ask after each sampled token; stop strings are the router's."""

from __future__ import annotations

from collections.abc import Collection

from common.core import Req
from common.work import FinishReason


def finish_reason(req: Req, token_id: int, eos_token_ids: Collection[int]) -> FinishReason | None:
    """Why the completion ends with token_id, just appended to req (append_host done); None: it goes on. Counts the tokens that
    were read: steps launched since have moved device_len on, but not the end of this one.

    An end or stop token wins over the length limit when both hold (USG-01).
    """
    params = req.sampling_params
    return finish_after(
        token_id,
        output_tokens=req.num_output,
        tokens_left=req.max_device_len - len(req.input_ids),
        ends=(() if params.ignore_eos else eos_token_ids, params.stop_token_ids),
        min_tokens=params.min_tokens,
    )


def finish_after(
    token_id: int, *, output_tokens: int, tokens_left: int, ends: tuple[Collection[int], Collection[int]], min_tokens: int
) -> FinishReason | None:
    """The rule over plain values. output_tokens: including token_id; ends: end-of-sequence ids and stop ids."""
    if output_tokens >= min_tokens and any(token_id in ids for ids in ends):
        return FinishReason.STOP
    return FinishReason.LENGTH if tokens_left <= 0 else None
