"""The dense decoder-only transformer of Llama and Qwen3; what differs between them is in ModelConfig.

It reads the batch from the global Context, so forward() takes no arguments.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from common.core import get_global_ctx
from common.engine.model_config import ModelConfig
from common.engine.ops import Ops
from common.engine.rotary import AttentionHeads, RotaryEmbedding
from common.engine.weights import WeightSource


class DenseModel:
    """What such a checkpoint computes. Needs a Context with page table, KV pool and attention backend, and a batch in it."""

    def __init__(self, config: ModelConfig, weights: WeightSource, ops: Ops, *, max_context: int) -> None:
        """Raises StartError if the weights lack a tensor. max_context: positions that will occur, at most the model's."""
        self.config = config
        self._embedding = weights.tensor("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        rotary = RotaryEmbedding(
            config.head_dim,
            theta=config.rope_theta,
            scaling=config.rope_scaling,
            max_context=max_context,
            dtype=ops.rotary_dtype(weights.dtype),
            device=weights.device,
        )
        self._layers = [DecoderLayer(config, weights, ops, rotary, index) for index in range(config.num_layers)]
        tied = config.tie_word_embeddings
        self._head = ops.normed_linear(
            self._embedding if tied else weights.tensor("lm_head.weight", config.vocab_size, config.hidden_size),
            norm=weights.tensor("model.norm.weight", config.hidden_size),
            eps=config.rms_norm_eps,
            shared=tied,
        )

    def forward(self) -> torch.Tensor:
        """Stores the batch's K and V; returns [requests with is_last_chunk, vocab_size] logits in the model's dtype."""
        batch = get_global_ctx().batch
        rows = batch.attn_metadata.logit_rows
        x = F.embedding(batch.input_ids, self._embedding)
        for layer in self._layers[:-1]:
            x = layer.forward(x)
        # Of the last layer's output only the rows that give logits are needed; its K and V are needed for all.
        x = self._layers[-1].forward(x, rows)
        if len(x) == 0:
            return x.new_empty(0, self.config.vocab_size)
        return self._head.forward(x)


class DecoderLayer:
    def __init__(self, config: ModelConfig, weights: WeightSource, ops: Ops, rotary: RotaryEmbedding, index: int) -> None:
        prefix = f"model.layers.{index}."
        hidden, inner = config.hidden_size, config.intermediate_size
        gate_up = [(f"{prefix}mlp.gate_proj", inner), (f"{prefix}mlp.up_proj", inner)]
        self._attention = Attention(config, weights, ops, rotary, index)
        self._gate_up = ops.gated_linear(
            *_projection(weights, gate_up, hidden, bias=config.mlp_bias),
            norm=weights.tensor(f"{prefix}post_attention_layernorm.weight", hidden),
            eps=config.rms_norm_eps,
        )
        self._down = ops.linear(*_projection(weights, [(f"{prefix}mlp.down_proj", hidden)], inner, bias=config.mlp_bias))

    def forward(self, x: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
        """x: [tokens, hidden_size], which may be overwritten -> the same, or [rows, hidden_size] of those rows."""
        attended = self._attention.attend(x)
        if rows is not None:
            attended, x = attended[rows], x[rows]
            if len(rows) == 0:
                return x
        x = self._attention.project(attended, x)
        return self._down.forward_add(self._gate_up.forward(x), x)


class Attention:
    def __init__(self, config: ModelConfig, weights: WeightSource, ops: Ops, rotary: RotaryEmbedding, index: int) -> None:
        prefix = f"model.layers.{index}.self_attn."
        self._index = index
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        parts = [(f"{prefix}q_proj", q_size), (f"{prefix}k_proj", kv_size), (f"{prefix}v_proj", kv_size)]
        self._qkv = ops.normed_linear(
            *_projection(weights, parts, config.hidden_size, bias=config.attention_bias),
            norm=weights.tensor(f"model.layers.{index}.input_layernorm.weight", config.hidden_size),
            eps=config.rms_norm_eps,
        )
        out = [(f"{prefix}o_proj", config.hidden_size)]
        self._out = ops.linear(*_projection(weights, out, q_size, bias=config.attention_bias))
        self._heads = AttentionHeads(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            q_norm=weights.tensor(f"{prefix}q_norm.weight", config.head_dim) if config.qk_norm else None,
            k_norm=weights.tensor(f"{prefix}k_norm.weight", config.head_dim) if config.qk_norm else None,
            eps=config.rms_norm_eps,
            rotary=rotary,
        )

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        """x: [tokens, hidden_size], before the layer's norm -> [tokens, num_heads * head_dim], before the output projection."""
        ctx = get_global_ctx()
        qkv, unnormed = self._qkv.forward_late(x)
        return ctx.attn_backend.forward(qkv, self._heads, self._index, ctx.batch, unnormed)

    def project(self, attended: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """residual + attended times the output projection: [tokens, hidden_size]. residual may be overwritten."""
        return self._out.forward_add(attended, residual)


def _projection(
    weights: WeightSource, parts: list[tuple[str, int]], in_size: int, *, bias: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight and bias of one product for several (name, out size) projections of the same input."""
    weight = weights.stacked([(f"{name}.weight", size) for name, size in parts], in_size)
    return weight, weights.stacked([(f"{name}.bias", size) for name, size in parts]) if bias else None
