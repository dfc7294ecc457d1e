"""Causal attention of one chunk of a prompt, in blocks of queries.

    | all tokens so far: length                          |
    |          | the chunk: tokens                       |
    |          |    block    |    block    |    block    |
    '--- keys of the 1st --'
    '--------- keys of the 2nd ---------'

Each block of queries meets only the keys up to its own end, so half of the products of a long prompt are never made. Scores and
softmax are float32; the products are common/engine/cpu_linear.py's, with AVX-512 2-3 times as fast as
scaled_dot_product_attention.
"""

from __future__ import annotations

import torch

from common.engine.cpu_linear import product

BLOCK_TOKENS = 128
"""Queries per block: fewer skip more keys, more have larger products (64 to 256 measured alike)."""


def block_mask(tokens: int, group: int, device: torch.device) -> torch.Tensor:
    """The triangle at a block's own keys, for a chunk of this many tokens: [block * group, block] float32, 0 or -inf."""
    block = min(tokens, BLOCK_TOKENS)
    positions = torch.arange(block, device=device)
    beyond = positions > positions.repeat_interleave(group)[:, None]
    return torch.zeros(beyond.shape, device=device).masked_fill_(beyond, float("-inf"))


def attend_chunk(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """q: [tokens, num_heads, head_dim], the last tokens of k, v: [length, num_kv_heads, head_dim]. mask: see block_mask.

    Returns [tokens, num_heads * head_dim]. The query heads of one KV head are rows of the same products."""
    tokens, num_heads, head_dim = q.shape
    length, num_kv_heads, _ = k.shape
    group = num_heads // num_kv_heads
    queries = _by_head(q.float() * head_dim**-0.5, num_kv_heads)
    keys, values = _by_head(k.float(), num_kv_heads), v.permute(1, 2, 0).contiguous()
    out = q.new_empty(tokens, num_kv_heads, group, head_dim)
    for start in range(0, tokens, BLOCK_TOKENS):
        end = min(start + BLOCK_TOKENS, tokens)
        seen, size = length - tokens + end, end - start
        for head in range(num_kv_heads):
            scores = product(queries[head, start * group : end * group], keys[head, :seen])
            scores[:, seen - size :].add_(mask[: size * group, :size])
            weights = scores.softmax(dim=-1).to(v.dtype)
            out[start:end, head] = product(weights, values[head, :, :seen]).view(size, group, head_dim)
    return out.view(tokens, -1)


def _by_head(x: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
    """[tokens, heads, head_dim] -> [num_kv_heads, tokens * group, head_dim], contiguous"""
    tokens, heads, head_dim = x.shape
    return x.view(tokens, num_kv_heads, -1, head_dim).transpose(0, 1).contiguous().view(num_kv_heads, -1, head_dim)
