"""CudaAttention: one fused kernel for q/k norm, rope and the KV store, then the attention kernel of the phase.

Which kernel serves which phase is the choice of common/engine/cuda/attention_choice.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from common.core import Batch
from common.engine.cuda import kernels
from common.engine.cuda.attention_kernels import DecodeKernel, PrefillKernel
from common.engine.kv_pool import KVPool
from common.engine.layers import Unnormed
from common.engine.rotary import AttentionHeads


@dataclass
class CudaMetadata:
    """logit_rows: see AttentionMetadata. peer_addr: [tokens] int64, see qk_norm_rope_store; None: nothing goes to a peer.

    Decode: block_tables: [requests, pages] int32, seq_lens: [requests] int32, on the device; None in prefill.
    """

    logit_rows: torch.Tensor | None
    peer_addr: torch.Tensor | None = None
    block_tables: torch.Tensor | None = None
    seq_lens: torch.Tensor | None = None


class CudaAttention:
    """An AttentionBackend. The runners fill batch.attn_metadata themselves: what they upload goes in one copy with the tokens."""

    def __init__(self, pool: KVPool, *, prefill: PrefillKernel, decode: DecodeKernel) -> None:
        self._pool = pool
        self.prefill = prefill
        self.decode = decode

    @contextmanager
    def prefilling_with(self, kernel: PrefillKernel | None) -> Iterator[None]:
        """Inside the block prompts attend with this kernel; None: with the usual one."""
        usual = self.prefill
        self.prefill = kernel or usual
        try:
            yield
        finally:
            self.prefill = usual

    def prepare_metadata(self, batch: Batch) -> None:
        """Nothing: see the class."""

    def forward(
        self, qkv: torch.Tensor, heads: AttentionHeads, layer: int, batch: Batch, unnormed: Unnormed | None = None
    ) -> torch.Tensor:
        """qkv: [tokens, (num_heads + 2 * num_kv_heads) * head_dim] -> [tokens, num_heads * head_dim]."""
        metadata = batch.attn_metadata
        assert isinstance(metadata, CudaMetadata)
        q = qkv.new_empty(len(qkv), heads.num_heads, heads.head_dim)
        kernels.qk_norm_rope_store(
            qkv,
            q,
            positions=batch.positions,
            cos_sin=heads.rotary.cos_sin,
            q_weight=heads.q_norm,
            k_weight=heads.k_norm,
            eps=heads.eps,
            pool=self._pool.tensor,
            layer=layer,
            out_loc=batch.out_loc,
            peer_addr=metadata.peer_addr,
            unnormed=unnormed,
        )
        out = torch.empty_like(q)
        k, v = self._pool.k(layer), self._pool.v(layer)
        if metadata.seq_lens is None:
            self.prefill.run(q, k, v, out)
        else:
            assert metadata.block_tables is not None
            self.decode.run(q, k, v, metadata.block_tables, metadata.seq_lens, out)
        return out.view(len(q), -1)
