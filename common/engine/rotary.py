"""Rotary position embedding, and what an attention backend must know of a layer's heads to apply it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from common.engine.model_config import RopeScaling


class RotaryRows(NamedTuple):
    """The rotations of one step's tokens. cos: [tokens, 1, head_dim], its halves equal; sin: [tokens, 1, head_dim / 2]."""

    cos: torch.Tensor
    sin: torch.Tensor

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        """x: [tokens, heads, head_dim]; its halves (a, b) become (a cos - b sin, b cos + a sin), in a new contiguous tensor
        of x's dtype, computed in that of the rotations."""
        if x.dtype != self.cos.dtype:
            return self.rotate(x.to(self.cos.dtype)).to(x.dtype)
        half = x.shape[-1] // 2
        rotated = x * self.cos
        rotated[..., :half].addcmul_(x[..., half:], self.sin, value=-1)
        rotated[..., half:].addcmul_(x[..., :half], self.sin)
        return rotated


class RotaryEmbedding:
    """Every position's rotation, computed once in float32. cos_sin: [max_context, head_dim], cosines and then sines."""

    def __init__(
        self, head_dim: int, *, theta: float, scaling: RopeScaling | None, max_context: int, dtype: torch.dtype, device: str
    ) -> None:
        angles = torch.outer(torch.arange(max_context).float(), inverse_frequencies(head_dim, theta=theta, scaling=scaling))
        self.cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1).to(device, dtype)

    def rows(self, positions: torch.Tensor) -> RotaryRows:
        """positions: [tokens] int64, each below max_context."""
        cos, sin = self.cos_sin[positions][:, None].chunk(2, dim=-1)
        return RotaryRows(torch.cat([cos, cos], dim=-1), sin.contiguous())


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionHeads:
    """One layer's heads: what lies between its projection and attention.

    q_norm, k_norm: [head_dim], weights of an RMSNorm of every head before it is rotated; None: no such norm. eps: of both.
    rotary: the same of every layer.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    eps: float
    rotary: RotaryEmbedding

    def split(self, qkv: torch.Tensor, rotations: RotaryRows) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """qkv: [tokens, (num_heads + 2 * num_kv_heads) * head_dim], heads of q, then k, then v. Returns the three, q and k
        normed and rotated: [tokens, num_heads or num_kv_heads, head_dim]."""
        heads = qkv.view(len(qkv), -1, self.head_dim)
        rotating = self.num_heads + self.num_kv_heads
        qk = heads[:, :rotating]
        if self.q_norm is not None and self.k_norm is not None:
            qk = F.rms_norm(qk, (self.head_dim,), eps=self.eps)
            qk[:, : self.num_heads].mul_(self.q_norm)
            qk[:, self.num_heads :].mul_(self.k_norm)
        qk = rotations.rotate(qk)
        return qk[:, : self.num_heads], qk[:, self.num_heads :], heads[:, rotating:]


def inverse_frequencies(head_dim: int, *, theta: float, scaling: RopeScaling | None) -> torch.Tensor:
    """[head_dim / 2] float32: radians per position of each rotating pair."""
    frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    # llama3: pairs that turn less than low_freq_factor times within the original context are stretched, fading out upwards.
    turns = scaling.original_max_context * frequencies / (2 * math.pi)
    span = scaling.high_freq_factor - scaling.low_freq_factor
    keep = ((turns - scaling.low_freq_factor) / span).clamp(0, 1)
    return frequencies * keep + frequencies / scaling.factor * (1 - keep)
