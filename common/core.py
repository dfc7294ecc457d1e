"""The nouns that flow through every engine: SamplingParams, Req, Batch, Context.

A request's life inside an engine is three lengths on one token axis:

    0            cached_len          device_len                max_device_len
    | KV in cache | computed this step |  not yet there          |
                  '---- extend_len ----'------ remain_len -------'

This module imports torch only where a method needs it, so that the router can use SamplingParams without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from common.token_ids import with_id
from common.work_key import WorkKey

if TYPE_CHECKING:
    import torch

    from common.engine.attention import AttentionBackend, AttentionMetadata
    from common.engine.kv_pool import KVPool


@dataclass
class SamplingParams:
    """How to choose each next token. The fields' ranges are checked in router/request/validation.py.

    temperature: 0 or less is greedy. max_tokens: output tokens at most.
    top_k: keep the k most likely; 0 or less is off. top_p: keep the smallest set that reaches this probability; 1.0 is off.
    min_p: drop tokens below min_p times the most likely one's probability; 0 is off.
    ignore_eos: the model's own end tokens do not end the output.
    repetition_penalty: over prompt and output; 1.0 is off. frequency_penalty, presence_penalty: over the output; 0 is off.
    seed: keys the random stream; None only before the router has drawn one.
    min_tokens: no end or stop token before this many output tokens.
    stop_token_ids: tokens that end the output.
    logit_bias: added to these tokens' logits.
    """

    temperature: float = 0.0
    top_k: int = -1
    top_p: float = 1.0
    ignore_eos: bool = False
    max_tokens: int = 1024
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int | None = None
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    logit_bias: dict[int, float] = field(default_factory=dict)

    @property
    def has_penalties(self) -> bool:
        return (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (1.0, 0.0, 0.0)

    @property
    def is_greedy(self) -> bool:
        """The draw needs no random number and no filter. top_p below 1 takes the filtering path even at temperature 0."""
        return (self.temperature <= 0.0 or self.top_k == 1) and self.top_p == 1.0


@dataclass(eq=False)
class Req:
    """One completion's state. Compared and hashed by identity: two requests may have equal fields.

    input_ids: [len] int32 on the CPU, the prompt plus what has been generated; where nothing is computed a plain array
    (common/token_ids.py). table_idx: its row in the page table, -1 for none.
    cached_len: leading tokens whose KV is in the cache.
    output_len: how many more tokens may be generated, counted from the construction.
    uid: the completion, minted by the router; unique per router.
    cache_handle: the stretch locked in the prefix cache, None while nothing is locked.

    What an attempt knows beyond that (it all travels, see common/wire.py):
    prompt_len: ids past it are output, on every attempt. Default: all ids are prompt.
    router_epoch, attempt: the rest of the work key.
    completion: which of the request's completions (the first, if n > 1); keys the random stream with the seed.
    n: completions that share this prompt, with consecutive uids. logprobs: None none, 0 the chosen token's, k also the k best.
    priority: higher goes first. request_id: the client's name, for logs. traceparent: of the attempt's span, empty for none.

    The last token's KV is never computed: at the end device_len is cached_len + 1. It leads len(input_ids) by tokens not read.
    """

    input_ids: torch.Tensor
    table_idx: int
    cached_len: int
    output_len: int
    uid: int
    sampling_params: SamplingParams
    cache_handle: Any
    prompt_len: int = -1
    router_epoch: int = 0
    attempt: int = 1
    completion: int = 0
    n: int = 1
    logprobs: int | None = None
    priority: int = 0
    request_id: str = ""
    traceparent: str = ""

    def __post_init__(self) -> None:
        assert getattr(self.input_ids, "is_cpu", True), "input_ids must be on the CPU"
        self.device_len = len(self.input_ids)
        self.max_device_len = len(self.input_ids) + self.output_len
        if self.prompt_len < 0:
            self.prompt_len = len(self.input_ids)
        # Strictly less: the last token is always computed, its hidden state gives the next logits.
        assert 0 <= self.cached_len < self.device_len <= self.max_device_len, f"bad lengths: {self!r}"
        assert 0 < self.prompt_len <= len(self.input_ids), f"prompt_len {self.prompt_len} of {len(self.input_ids)} ids"

    @property
    def key(self) -> WorkKey:
        return WorkKey(self.router_epoch, self.uid, self.attempt)

    @property
    def remain_len(self) -> int:
        return self.max_device_len - self.device_len

    @property
    def extend_len(self) -> int:
        """Tokens that go into the model this step: what the cache lacks in prefill, 1 in decode."""
        return self.device_len - self.cached_len

    @property
    def can_decode(self) -> bool:
        return self.remain_len > 0

    @property
    def num_output(self) -> int:
        """Tokens generated and read so far, earlier attempts included; also the output index of the next one to be read."""
        return len(self.input_ids) - self.prompt_len

    @property
    def is_last_chunk(self) -> bool:
        """This step computes the last known token, so it yields the logits of the next one."""
        return self.device_len >= len(self.input_ids)

    def take_chunk(self, max_tokens: int) -> int:
        """Chunked prefill: limit this step to max_tokens (>= 1) tokens past cached_len; returns how many it computes."""
        self.device_len = min(self.cached_len + max_tokens, len(self.input_ids))
        return self.extend_len

    def complete_chunk(self) -> None:
        """A chunk that was not the last is launched: its tokens count as cached, nothing is sampled."""
        self.cached_len = self.device_len

    def complete_one(self) -> None:
        """A forward pass is launched: its tokens count as cached and the next step computes one more."""
        self.cached_len = self.device_len
        self.device_len += 1

    def append_host(self, next_token: torch.Tensor) -> None:
        """Appends next_token: [1] int32 on the CPU."""
        self.append_id(int(next_token))

    def append_id(self, token_id: int) -> None:
        """Appends one token that was read."""
        self.input_ids = with_id(self.input_ids, token_id)

    def __repr__(self) -> str:
        return (
            f"Req(uid={self.uid}, table_idx={self.table_idx}, cached_len={self.cached_len}, "
            f"device_len={self.device_len}, max_device_len={self.max_device_len})"
        )


@dataclass
class Batch:
    """The requests of one forward pass, packed end to end without padding: every tensor is [total_tokens].

    padded_reqs: filled by the graph runner (dummy requests up to a captured size); equals reqs without graphs.
    input_ids, positions: int32 / int64 on the device; out_loc: int64, token locations in the KV pool; filled by the scheduler.
    attn_metadata: filled by the attention backend.
    """

    reqs: list[Req]
    phase: Literal["prefill", "decode"]
    input_ids: torch.Tensor = field(init=False)
    positions: torch.Tensor = field(init=False)
    out_loc: torch.Tensor = field(init=False)
    padded_reqs: list[Req] = field(init=False)
    attn_metadata: AttentionMetadata = field(init=False)

    @property
    def is_prefill(self) -> bool:
        return self.phase == "prefill"

    @property
    def is_decode(self) -> bool:
        return self.phase == "decode"

    @property
    def size(self) -> int:
        return len(self.reqs)

    @property
    def padded_size(self) -> int:
        return len(self.padded_reqs)


@dataclass
class Context:
    """What there is one of per engine process.

    page_table: [rows, max_context] int32 on the device; each element a token's location in the KV pool as if page_size were 1
    (page id * page_size + offset in the page).
    """

    page_size: int
    page_table: torch.Tensor = field(init=False)
    attn_backend: AttentionBackend = field(init=False)
    moe_backend: Any = field(init=False)
    kv_cache: KVPool = field(init=False)
    _batch: Batch | None = field(default=None, init=False)

    @property
    def batch(self) -> Batch:
        assert self._batch is not None, "No active batch in context"
        return self._batch

    @contextmanager
    def forward_batch(self, batch: Batch) -> Iterator[None]:
        """Makes batch the current one inside the with block; refuses to nest."""
        assert self._batch is None, "Nested forward_batch is not allowed"
        try:
            self._batch = batch
            yield
        finally:
            self._batch = None


_global_ctx: Context | None = None


def set_global_ctx(ctx: Context) -> None:
    """Installs the process's context; refuses a second one."""
    global _global_ctx
    assert _global_ctx is None, "Global context is already set"
    _global_ctx = ctx


def get_global_ctx() -> Context:
    assert _global_ctx is not None, "Global context is not set"
    return _global_ctx


def reset_global_ctx() -> None:
    """Removes the context, for tests that build several engines in one process."""
    global _global_ctx
    _global_ctx = None
