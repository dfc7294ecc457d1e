"""What a request is once it has been checked: plain values whose rules hold, so that nobody re-checks them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from common.core import SamplingParams
from common.work import MAX_COMPLETIONS
from router.request.rules import LengthRule

MAX_ID_BYTES = 256
MAX_STOP = 16
MAX_STOP_BYTES = 1024
MAX_STOP_TOKENS = 64
MAX_BIAS = 1024
MAX_LOGPROBS = 20
MAX_N = MAX_COMPLETIONS
MAX_KWARGS_BYTES = 256 << 10
MAX_LISTED = 2 << 20
"""Ids in Tokenize's answer and Detokenize's question: those of 2 MiB of text, whatever the tokenizer."""
LISTED = LengthRule(MAX_LISTED, "what is listed")
ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True)
class Limits:
    """The served model's limits. max_context: prompt and output together, in tokens. prompt_cap: --max-prompt-tokens."""

    vocab_size: int
    max_context: int
    prompt_cap: int | None = None

    def within(self, max_context: int | None) -> Limits:
        """The same with no more context than that; None: whatever there is."""
        if max_context is None or max_context >= self.max_context:
            return self
        return replace(self, max_context=max_context)

    @property
    def max_prompt_tokens(self) -> int:
        """At most one less than the context: a prompt leaves room for a token of output."""
        room = self.max_context - 1
        return room if self.prompt_cap is None else min(room, self.prompt_cap)

    @property
    def prompt_length(self) -> LengthRule:
        most = self.max_prompt_tokens
        is_capped = most < self.max_context - 1
        return LengthRule(most, "--max-prompt-tokens" if is_capped else f"the context of {self.max_context} less one")


class TextPrompt(NamedTuple):
    """Not empty."""

    text: str


class IdsPrompt(NamedTuple):
    """ids: at least one, at most max_prompt_tokens, each below vocab_size."""

    ids: list[int]


class ChatPrompt(NamedTuple):
    """messages: at least one {"role", "content"}, every role known. kwargs: extra variables for the template."""

    messages: list[dict[str, str]]
    kwargs: dict[str, Any]


Prompt = TextPrompt | IdsPrompt | ChatPrompt


@dataclass(frozen=True)
class ValidRequest:
    """request_id: empty if the client gave none.
    sampling: seed is None unless the client gave one; max_tokens is as given, or the default: whoever knows the prompt's
    length cuts it to the context.
    max_tokens_given: tells a given max_tokens from the default.
    stop: without doubles, in the client's order.
    logprobs: None for none, 0 for the chosen token's, k for also the k best; at most vocab_size.
    n: completions, 1 to MAX_N.
    """

    request_id: str
    prompt: Prompt
    sampling: SamplingParams
    max_tokens_given: bool
    stop: tuple[str, ...]
    include_stop: bool
    logprobs: int | None
    n: int
    priority: int
    include_special_tokens: bool
    ids_only: bool
