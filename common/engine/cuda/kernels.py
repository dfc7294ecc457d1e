"""The step's small kernels. All are launched on the current stream, wait for nothing on the host and can be captured in a graph.

Tensors are bf16 or fp16 where no dtype is given, and their last dimension is contiguous; other strides are free unless said.
pdl: launch with programmatic dependent launch (CUDA C++ programming guide, "Programmatic Dependent Launch and Synchronization"),
so that the kernel is in place when the one before it ends.
"""

from __future__ import annotations

import torch

from common.engine.cuda.jit.copy import copy_pages_kernel
from common.engine.cuda.jit.elementwise import rms_norm_kernel, silu_and_mul_kernel
from common.engine.cuda.jit.rope_store import qk_norm_rope_store_kernel
from common.engine.cuda.jit.step import advance_kernel, gather_step_kernel, scatter_updates_kernel
from common.engine.cuda.launch import ceil_div, is_power_of_2, launch_options, power_of_2_from, warps_for
from common.engine.layers import Unnormed

MAX_NORM_WIDTH = 16384
MANY_TOKENS = 1024
"""From here on qk_norm_rope_store takes several tokens per program: there are programs enough, so make fewer and larger ones."""
TOKENS_PER_PROGRAM = 4
HEADS_PER_PROGRAM = 8
SHARE = 4
"""A thread takes so many times more values of an un-normed row than of others: they are only squared."""
SILU_BLOCK = 1024
TABLE_BLOCK = 256
UPDATES_PER_PROGRAM = 8
COPY_BYTES = 16384
"""Bytes of a page that a program copies at a time: 4 x 16 bytes in flight for each of 256 threads."""


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, *, eps: float, out: torch.Tensor, pdl: bool | None = None
) -> torch.Tensor:
    """out = x / rms(x) * weight (None: of ones), in float32 inside. Returns out.

    x, out: [tokens, width], width <= 16384; out may be x."""
    tokens, width = x.shape
    assert width <= MAX_NORM_WIDTH and x.stride(1) == out.stride(1) == 1
    block = power_of_2_from(width)
    rms_norm_kernel[(tokens,)](
        x, weight, out, x.stride(0), out.stride(0), eps, H=width, BLOCK=block, **launch_options(warps_for(block), pdl=pdl)
    )  # fmt: skip
    return out


def silu_and_mul(
    gate_up: torch.Tensor, out: torch.Tensor, *, unnormed: Unnormed | None = None, pdl: bool | None = None
) -> torch.Tensor:
    """out = silu(gate) * up, in float32 inside. gate_up: [tokens, 2 * inner], gate first; out: [tokens, inner]. Returns out.

    unnormed: gate and up are divided by its root. Each program reads a whole row of it, so it is for few tokens."""
    tokens, inner = out.shape
    source, eps, stride, width = _source(unnormed, tokens)
    assert gate_up.stride(1) == out.stride(1) == 1 and gate_up.shape[1] == 2 * inner
    block = min(SILU_BLOCK, power_of_2_from(inner))
    silu_and_mul_kernel[(tokens * ceil_div(inner, block),)](
        gate_up, out, source, gate_up.stride(0), out.stride(0), stride, eps, INNER=inner, BLOCK=block, WIDTH=width,
        WIDTH_BLOCK=power_of_2_from(max(width, 1)), **launch_options(warps_for(block), pdl=pdl)
    )  # fmt: skip
    return out


def qk_norm_rope_store(
    qkv: torch.Tensor,
    q_out: torch.Tensor,
    *,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    pool: torch.Tensor,
    layer: int,
    out_loc: torch.Tensor,
    peer_addr: torch.Tensor | None = None,
    unnormed: Unnormed | None = None,
    pdl: bool | None = None,
) -> None:
    """Norm and rotation of the q and k heads; q to q_out, k and v to their places in the pool, in float32 until they are written.

    qkv: [tokens, (heads + 2 kv_heads) * head_dim], as the projection made it. q_out: [tokens, heads, head_dim], heads contiguous.
    positions: [tokens] int. cos_sin: [max_context, head_dim] float32 contiguous, a row's first half cos, its second half sin.
    q_weight, k_weight: [head_dim] RMSNorm weights, or None for a model without them.
    pool: [pages, layers, 2, page_size, kv_heads, head_dim] contiguous; layer: the one being computed.
    out_loc: [tokens] int, page * page_size + offset; negative: this pool doesn't get the token.
    peer_addr: [tokens] int64, where in a pool of the same geometry (but for its number of pages) the token's layer-0 K belongs:
    an address as mapped in this process, 16-byte aligned; 0: no peer gets the token.
    unnormed: qkv is divided by its root first; for fewer than MANY_TOKENS.
    head_dim and page_size are powers of two, head_dim >= 32.
    """
    tokens, heads, head_dim = q_out.shape
    _, _, _, page_size, kv_heads, _ = pool.shape
    assert head_dim >= 32 and is_power_of_2(head_dim) and q_out.stride(1) == head_dim and pool.is_contiguous()
    assert qkv.shape == (tokens, (heads + 2 * kv_heads) * head_dim) and cos_sin.dtype == torch.float32
    token_block = TOKENS_PER_PROGRAM if tokens >= MANY_TOKENS else 1
    head_block = min(HEADS_PER_PROGRAM, power_of_2_from(kv_heads))
    groups = ceil_div(heads, head_block) + 2 * ceil_div(kv_heads, head_block)
    source, source_eps, source_stride, width = _source(unnormed, tokens)
    warps = max(warps_for(token_block * head_block * head_dim // 2), warps_for(power_of_2_from(max(width, 1)) // SHARE))
    qk_norm_rope_store_kernel[(ceil_div(tokens, token_block) * groups,)](
        qkv, q_out, positions, cos_sin, q_weight, k_weight, pool, out_loc, peer_addr, source,
        tokens, qkv.stride(0), q_out.stride(0), pool.stride(0), layer, eps, source_stride, source_eps,
        WIDTH=width, WIDTH_BLOCK=power_of_2_from(max(width, 1)), HQ=heads, HKV=kv_heads, D=head_dim, PAGE_SIZE=page_size,
        TB=token_block, HB=head_block, **launch_options(warps, pdl=pdl),
    )  # fmt: skip


def _source(unnormed: Unnormed | None, tokens: int) -> tuple[torch.Tensor | None, float, int, int]:
    """What kernels that divide take: x, eps, x's stride and width."""
    if unnormed is None:
        return None, 0.0, 0, 0
    x, eps = unnormed
    assert x.stride(1) == 1 and len(x) == tokens and x.shape[1] <= MAX_NORM_WIDTH
    return x, eps, x.stride(0), x.shape[1]


def gather_step(
    slots: torch.Tensor,
    *,
    token: torch.Tensor,
    device_len: torch.Tensor,
    page_table: torch.Tensor,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    seq_lens: torch.Tensor,
    out_loc: torch.Tensor,
    block_tables: torch.Tensor,
    page_size: int,
    pdl: bool | None = None,
) -> None:
    """A decode step's inputs, from the state of the requests in it: entry b is the request whose state is in row slots[b].

    slots: [batch] int32. State: token [rows] int, the last one of each; device_len [rows] int32, tokens including that one, >= 1;
    page_table [rows, max_context] int32, token locations (PageTable).
    Written: input_ids, positions, out_loc [batch] int32 or int64; seq_lens [batch] int32; block_tables [batch, max pages] int32,
    whose entries past a request's last page stay as they are.
    """
    batch, max_pages = len(slots), block_tables.shape[1]
    block = min(TABLE_BLOCK, power_of_2_from(max_pages))
    assert max_pages * page_size >= page_table.shape[1]
    gather_step_kernel[(batch, ceil_div(max_pages, block))](
        slots, token, device_len, page_table, input_ids, positions, seq_lens, out_loc, block_tables,
        page_table.stride(0), block_tables.stride(0), PAGE_SIZE=page_size, BLOCK=block,
        **launch_options(warps_for(block), pdl=pdl),
    )  # fmt: skip


def advance(
    slots: torch.Tensor,
    next_token: torch.Tensor,
    *,
    token: torch.Tensor,
    device_len: torch.Tensor,
    dummy_slot: int,
    pdl: bool | None = None,
) -> None:
    """The step's tokens become the state that the next step gathers, one longer. The row dummy_slot stays as it is.

    slots: [batch] int32, each but dummy_slot once; next_token: [batch] int; token: [rows] int; device_len: [rows] int32.
    """
    block = min(128, power_of_2_from(len(slots)))
    advance_kernel[(ceil_div(len(slots), block),)](
        slots, next_token, token, device_len, len(slots), dummy_slot, BLOCK=block, **launch_options(warps_for(block), pdl=pdl)
    )  # fmt: skip


def scatter_updates(updates: torch.Tensor, page_table: torch.Tensor, *, page_size: int, count: int | None = None) -> None:
    """Writes pages into the page table: PageTable.assign, for updates that were uploaded.

    updates: [1 + 3 * capacity] int32 contiguous: their count, then as many triples (row, index of the page in the row, page).
    page_table: [rows, max_context] int32. count: the count, if the host knows it; else programs for the whole capacity start.
    """
    count = (len(updates) - 1) // 3 if count is None else count
    if count == 0:
        return
    scatter_updates_kernel[(ceil_div(count, UPDATES_PER_PROGRAM),)](
        updates, page_table, page_table.stride(0), PAGE_SIZE=page_size, BLOCK=UPDATES_PER_PROGRAM, num_warps=4
    )  # fmt: skip


def copy_pages(
    src_pool: torch.Tensor, src_pages: torch.Tensor, dst_base: int, dst_pages: torch.Tensor, *, max_programs: int = 1 << 30
) -> None:
    """Copies page src_pages[i] of src_pool, all layers, to page dst_pages[i] of the pool whose first byte is at dst_base.

    src_pool: [pages, ...] contiguous, a page a multiple of 16 bytes; src_pages, dst_pages: [n] int32 or int64.
    dst_base: 16-byte aligned address that this GPU can write. max_programs: fewer leave SMs to kernels on other streams.
    """
    assert src_pool.is_contiguous() and dst_base % 16 == 0
    page_words = src_pool.stride(0) * src_pool.element_size() // 8
    block = min(COPY_BYTES // 8, power_of_2_from(page_words))
    pieces = len(src_pages) * ceil_div(page_words, block)
    if pieces:
        copy_pages_kernel[(min(pieces, max_programs),)](
            src_pool.view(torch.int64), src_pages, dst_base, dst_pages, pieces,
            PAGE_WORDS=page_words, BLOCK=block, num_warps=warps_for(block),
        )  # fmt: skip
