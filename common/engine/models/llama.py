"""The Llama architecture over a packed batch. It reads the batch from the global Context, so forward() takes no arguments."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from common.core import get_global_ctx
from common.engine.layers import Linear, RMSNorm, RotaryEmbedding, RotaryRows, make_linear
from common.engine.model_config import LlamaConfig
from common.engine.weights import WeightSource, stacked


class Llama:
    """What a Llama checkpoint computes. Needs a Context with page table, KV pool and attention backend, and a batch in it."""

    def __init__(
        self,
        config: LlamaConfig,
        weights: WeightSource,
        *,
        max_context: int,
        dtype: torch.dtype,
        device: str,
        progress: Callable[[str], None],
    ) -> None:
        """Raises StartError if the weights lack a tensor. max_context: positions that will occur, at most the model's."""
        self.config = config
        self._embedding = weights.tensor("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        self._layers = []
        for index in range(config.num_layers):
            self._layers.append(DecoderLayer(config, weights, index))
            progress(f"loaded layer {index + 1} of {config.num_layers}")
        self._norm = RMSNorm(weights.tensor("model.norm.weight", config.hidden_size), config.rms_norm_eps)
        tied = config.tie_word_embeddings
        head = self._embedding if tied else weights.tensor("lm_head.weight", config.vocab_size, config.hidden_size)
        self._head = make_linear(head)
        self._rotary = RotaryEmbedding(
            config.head_dim,
            theta=config.rope_theta,
            scaling=config.rope_scaling,
            max_context=max_context,
            dtype=dtype,
            device=device,
        )

    def forward(self) -> torch.Tensor:
        """Stores the batch's K and V; returns [requests with is_last_chunk, vocab_size] logits in the model's dtype."""
        batch = get_global_ctx().batch
        rows = batch.attn_metadata.logit_rows
        rotary = self._rotary.rows(batch.positions)
        x = F.embedding(batch.input_ids, self._embedding)
        for layer in self._layers[:-1]:
            x = layer.forward(x, rotary)
        # Of the last layer's output only the rows that give logits are needed; its K and V are needed for all.
        x = self._layers[-1].forward(x, rotary, rows)
        if len(x) == 0:
            return x.new_empty(0, self.config.vocab_size)
        return self._head.forward(self._norm.forward(x))


class DecoderLayer:
    def __init__(self, config: LlamaConfig, weights: WeightSource, index: int) -> None:
        prefix = f"model.layers.{index}."
        hidden, inner, eps = config.hidden_size, config.intermediate_size, config.rms_norm_eps
        self._attention = Attention(config, weights, index)
        self._gate_up = _projection(
            weights, [(f"{prefix}mlp.gate_proj", inner), (f"{prefix}mlp.up_proj", inner)], hidden, bias=config.mlp_bias
        )
        self._down = _projection(weights, [(f"{prefix}mlp.down_proj", hidden)], inner, bias=config.mlp_bias)
        self._input_norm = RMSNorm(weights.tensor(f"{prefix}input_layernorm.weight", hidden), eps)
        self._post_norm = RMSNorm(weights.tensor(f"{prefix}post_attention_layernorm.weight", hidden), eps)

    def forward(self, x: torch.Tensor, rotary: RotaryRows, rows: torch.Tensor | None = None) -> torch.Tensor:
        """x: [tokens, hidden_size] -> the same, or [rows, hidden_size] of those rows."""
        attended = self._attention.attend(self._input_norm.forward(x), rotary)
        if rows is not None:
            attended, x = attended[rows], x[rows]
            if len(rows) == 0:
                return x
        x = self._attention.project(attended, x)
        gate, up = self._gate_up.forward(self._post_norm.forward(x)).chunk(2, dim=-1)
        return self._down.forward_add(F.silu(gate).mul_(up), x)


class Attention:
    def __init__(self, config: LlamaConfig, weights: WeightSource, index: int) -> None:
        prefix = f"model.layers.{index}.self_attn."
        self._index = index
        self._head_dim = config.head_dim
        self._num_heads, self._num_kv_heads = config.num_heads, config.num_kv_heads
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        parts = [(f"{prefix}q_proj", q_size), (f"{prefix}k_proj", kv_size), (f"{prefix}v_proj", kv_size)]
        self._qkv = _projection(weights, parts, config.hidden_size, bias=config.attention_bias)
        self._out = _projection(weights, [(f"{prefix}o_proj", config.hidden_size)], q_size, bias=config.attention_bias)

    def attend(self, x: torch.Tensor, rotary: RotaryRows) -> torch.Tensor:
        """x: [tokens, hidden_size] -> [tokens, num_heads * head_dim], before the output projection."""
        qkv = self._qkv.forward(x).view(len(x), -1, self._head_dim)
        split = self._num_heads + self._num_kv_heads
        qk = rotary.rotate(qkv[:, :split])
        ctx = get_global_ctx()
        return ctx.attn_backend.forward(
            qk[:, : self._num_heads], qk[:, self._num_heads :], qkv[:, split:], self._index, ctx.batch
        )

    def project(self, attended: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """residual + attended times the output projection: [tokens, hidden_size]."""
        return self._out.forward_add(attended, residual)


def _projection(weights: WeightSource, parts: list[tuple[str, int]], in_size: int, *, bias: bool) -> Linear:
    """One product for several (name, out size) projections of the same input."""
    weight = stacked(weights, [(f"{name}.weight", size) for name, size in parts], in_size)
    return make_linear(weight, stacked(weights, [(f"{name}.bias", size) for name, size in parts]) if bias else None)
