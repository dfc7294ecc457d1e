"""q/k norm, rotation and the stores of q, k and v, in one pass over the projection's output.

A row of qkv:   | q head 0 ... q head HQ-1 | k head 0 ... k head HKV-1 | v head 0 ... v head HKV-1 |     D values each

A program takes TB tokens x HB heads of one kind as a tile of TB * HB rows; a head's two halves are loaded apart, because the
rotation (NeoX style: Su et al., RoFormer, in GPT-NeoX's order of pairs) mixes element i with element i + D / 2.
"""

import triton
import triton.language as tl

from common.engine.cuda.jit.elementwise import begin, inverse_root


@triton.jit
def load_halves(rows, cols, mask, D: tl.constexpr):
    """rows: [R] pointers to heads -> two tiles [R, D / 2]."""
    low = rows[:, None] + cols[None, :]
    return tl.load(low, mask=mask[:, None], other=0.0), tl.load(low + D // 2, mask=mask[:, None], other=0.0)


@triton.jit
def load_heads(rows, cols, mask, scale, D: tl.constexpr):
    """As load_halves; times scale, if there is one."""
    a, b = load_halves(rows, cols, mask, D)
    if scale is not None:
        a = a.to(tl.float32) * scale
        b = b.to(tl.float32) * scale
    return a, b


@triton.jit
def store_halves(rows, cols, mask, a, b, D: tl.constexpr):
    low = rows[:, None] + cols[None, :]
    tl.store(low, a.to(rows.dtype.element_ty), mask=mask[:, None])
    tl.store(low + D // 2, b.to(rows.dtype.element_ty), mask=mask[:, None])


@triton.jit
def norm_and_rotate(a, b, weight, eps, cos_sin, positions, token, cols, mask, D: tl.constexpr):
    """a, b: halves [R, D / 2] of the heads of these tokens -> float32 halves."""
    a = a.to(tl.float32)
    b = b.to(tl.float32)
    if weight is not None:
        scale = tl.rsqrt(tl.sum(a * a + b * b, axis=1) / D + eps)[:, None]
        # As a tile that repeats the weight, in the tile's own layout: one row of it would have to go through shared memory.
        weight_a, weight_b = load_halves(weight + token * 0, cols, mask, D)
        a = a * scale * weight_a.to(tl.float32)
        b = b * scale * weight_b.to(tl.float32)
    position = tl.load(positions + token, mask=mask, other=0).to(tl.int64)
    cos, sin = load_halves(cos_sin + position * D, cols, mask, D)
    return a * cos - b * sin, b * cos + a * sin


@triton.jit
def store_kv(
    a, b, pool, out_loc, peer_addr, page_stride, layer, token, head, cols, mask,
    KV: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, PAGE_SIZE: tl.constexpr,
):  # fmt: skip
    """Halves of K (KV = 0) or V (KV = 1) rows to this GPU's pool and, where peer_addr says so, to the peer's."""
    loc = tl.load(out_loc + token, mask=mask, other=-1).to(tl.int64)
    in_layer = (layer * 2 + KV).to(tl.int64) * (PAGE_SIZE * HKV * D) + head * D
    own = pool + loc // PAGE_SIZE * page_stride + loc % PAGE_SIZE * (HKV * D) + in_layer
    store_halves(own, cols, mask & (loc >= 0), a, b, D)
    if peer_addr is not None:
        ELEMENT: tl.constexpr = pool.dtype.element_ty
        BYTES: tl.constexpr = pool.dtype.element_ty.primitive_bitwidth // 8
        base = tl.load(peer_addr + token, mask=mask, other=0)
        peer = tl.multiple_of((base + in_layer * BYTES).to(tl.pointer_type(ELEMENT)), 16)
        store_halves(peer, cols, mask & (base != 0), a, b, D)


@triton.jit(do_not_specialize=["tokens", "layer"], do_not_specialize_on_alignment=["positions", "out_loc", "peer_addr"])
def qk_norm_rope_store_kernel(
    qkv, q_out, positions, cos_sin, q_weight, k_weight, pool, out_loc, peer_addr, source,
    tokens, qkv_stride, q_out_stride, page_stride, layer, eps, source_stride, source_eps,
    WIDTH: tl.constexpr, WIDTH_BLOCK: tl.constexpr, HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, PAGE_SIZE: tl.constexpr,
    TB: tl.constexpr, HB: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    Q_GROUPS: tl.constexpr = (HQ + HB - 1) // HB
    KV_GROUPS: tl.constexpr = (HKV + HB - 1) // HB
    program = tl.program_id(0)
    group = program % (Q_GROUPS + 2 * KV_GROUPS)
    rows = tl.arange(0, TB * HB)
    cols = tl.arange(0, D // 2)
    token = (program // (Q_GROUPS + 2 * KV_GROUPS) * TB + rows // HB).to(tl.int64)
    heads = qkv + token * qkv_stride
    scale = None
    if source is not None:
        tl.static_assert(TB == 1, "a program that divides has one token")
        row = (program // (Q_GROUPS + 2 * KV_GROUPS)).to(tl.int64)
        scale = inverse_root(source, row, source_stride, source_eps, WIDTH, WIDTH_BLOCK)
    if group < Q_GROUPS:
        head = group * HB + rows % HB
        mask = (token < tokens) & (head < HQ)
        a, b = load_heads(heads + head * D, cols, mask, scale, D)
        a, b = norm_and_rotate(a, b, q_weight, eps, cos_sin, positions, token, cols, mask, D)
        store_halves(q_out + token * q_out_stride + head * D, cols, mask, a, b, D)
    elif group < Q_GROUPS + KV_GROUPS:
        head = (group - Q_GROUPS) * HB + rows % HB
        mask = (token < tokens) & (head < HKV)
        a, b = load_heads(heads + (HQ + head) * D, cols, mask, scale, D)
        a, b = norm_and_rotate(a, b, k_weight, eps, cos_sin, positions, token, cols, mask, D)
        store_kv(a, b, pool, out_loc, peer_addr, page_stride, layer, token, head, cols, mask, 0, HKV, D, PAGE_SIZE)
    else:
        head = (group - Q_GROUPS - KV_GROUPS) * HB + rows % HB
        mask = (token < tokens) & (head < HKV)
        v_a, v_b = load_heads(heads + (HQ + HKV + head) * D, cols, mask, scale, D)
        store_kv(v_a, v_b, pool, out_loc, peer_addr, page_stride, layer, token, head, cols, mask, 1, HKV, D, PAGE_SIZE)
