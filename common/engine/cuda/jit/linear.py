"""y = f(x W^T) for a few rows of x: the time is that of reading W once. W: [rows, K] contiguous.

Around the product, where asked: RMSNorm of x before it; after it residual + y, or silu(gate) * up, where W has the gate's N rows
first and then the up projection's.

The norm costs no pass of its own: x goes into the product (x * norm_weight, if W has not the norm's weight in it), the sum of its
squares is taken on the way, and what the product gives is divided by the root in the end.
"""

import triton
import triton.language as tl

from common.engine.cuda.jit.elementwise import begin, prefetch, silu

VECTOR = tl.constexpr(8)
"""bf16 or fp16 values in 16 bytes."""


@triton.jit
def weight_rows(first, ROWS: tl.constexpr, N: tl.constexpr, GATED: tl.constexpr):
    """Which rows of W a tile has, [ROWS], and which of them exist. N: columns of the output. Gated, the rows alternate:

    tile row 2i: W[first + i] (gate)    2i + 1: W[N + first + i] (up)
    """
    index = tl.arange(0, ROWS)
    if GATED:
        column = first // 2 + index // 2
        return column + index % 2 * N, column < N
    return first + index, first + index < N


@triton.jit
def prefetch_rows(weight, row, start, DEPTH: tl.constexpr, LINES: tl.constexpr, K: tl.constexpr):
    """Sends for DEPTH values from start on of these rows of W. LINES: DEPTH / 64 or the next power of two; past the end of a row
    its last line is asked for again."""
    line = tl.minimum(start // 64 + tl.minimum(tl.arange(0, LINES), DEPTH // 64 - 1), K // 64 - 1)
    prefetch(weight + (row.to(tl.int64) * K)[:, None] + (line * 64)[None, :])


@triton.jit
def finish(y, first, residual, out, residual_stride, out_stride, TOKENS, TB, COLUMNS, N):
    """y: [TB, COLUMNS] float32, the output from column `first` on but for the residual."""
    token = tl.arange(0, TB)[:, None]
    column = first + tl.arange(0, COLUMNS)[None, :]
    mask = (token < TOKENS) & (column < N)
    if residual is not None:
        y += tl.load(residual + token * residual_stride + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + token * out_stride + column, y.to(out.dtype.element_ty), mask=mask)


@triton.jit
def fold(values, TB: tl.constexpr, ROWS: tl.constexpr, BK: tl.constexpr):
    """[TB, ROWS, BK] -> [TB, ROWS, BK / 8]: sums of what a single thread holds."""
    return tl.sum(tl.reshape(values, (TB, ROWS, BK // VECTOR, VECTOR)), axis=3)


@triton.jit
def fma_step(
    acc, squares, w, x, norm_weight, depth, x_mask, depth_mask,
    NORM: tl.constexpr, TB: tl.constexpr, ROWS: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    values = tl.load(x + depth, mask=x_mask & depth_mask, other=0.0).to(tl.float32)
    if NORM:
        squares += fold(values * values, TB, 1, BK)
    if norm_weight is not None:
        values *= tl.load(norm_weight + depth, mask=depth_mask, other=0.0).to(tl.float32)
    return acc + fold(values * w.to(tl.float32), TB, ROWS, BK), squares


@triton.jit
def linear_fma_kernel(
    x, weight, norm_weight, residual, out, x_stride, residual_stride, out_stride, eps,
    TOKENS: tl.constexpr, TB: tl.constexpr, N: tl.constexpr, K: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr,
    ROWS: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, LINES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: ROWS rows of W over all of K, on the ordinary cores. The next tile of W is on its way while one is multiplied.

    BK is 256 times the number of warps (or more), so that all threads lie along K and x's values are where W's are.
    """
    first = tl.program_id(0) * ROWS
    row, row_mask = weight_rows(first, ROWS, N, GATED)
    if LINES > 0:
        prefetch_rows(weight, tl.where(row_mask, row, 0), 0, K, LINES, K)
    w_rows = weight + (row.to(tl.int64) * K)[None, :, None]
    depth = tl.arange(0, BK)[None, None, :]
    token = tl.arange(0, TB)[:, None, None]
    x_rows = x + token * x_stride
    x_mask = token < TOKENS
    w_mask = row_mask[None, :, None]
    acc = tl.zeros((TB, ROWS, BK // VECTOR), tl.float32)
    squares = tl.zeros((TB, 1, BK // VECTOR), tl.float32)
    if STAGES > 1:
        begin(PDL)
        for start in tl.range(0, K, BK, num_stages=STAGES):
            at = depth + start
            w = tl.load(w_rows + at, mask=w_mask & (at < K), other=0.0, eviction_policy="evict_first")
            acc, squares = fma_step(acc, squares, w, x_rows, norm_weight, at, x_mask, at < K, NORM, TB, ROWS, BK)
    else:
        w = tl.load(w_rows + depth, mask=w_mask & (depth < K), other=0.0, eviction_policy="evict_first")
        begin(PDL)
        for start in range(BK, K, BK):
            at = depth + start
            ahead = tl.load(w_rows + at, mask=w_mask & (at < K), other=0.0, eviction_policy="evict_first")
            acc, squares = fma_step(acc, squares, w, x_rows, norm_weight, at - BK, x_mask, at - BK < K, NORM, TB, ROWS, BK)
            w = ahead
        at = depth + (K - 1) // BK * BK
        acc, squares = fma_step(acc, squares, w, x_rows, norm_weight, at, x_mask, at < K, NORM, TB, ROWS, BK)
    y = tl.sum(acc, axis=2)
    if NORM:
        y *= tl.rsqrt(tl.sum(squares, axis=2) / K + eps)
    if GATED:
        gate, up = tl.split(tl.reshape(y, (TB, ROWS // 2, 2)))
        finish(silu(gate) * up, first // 2, residual, out, residual_stride, out_stride, TOKENS, TB, ROWS // 2, N)
    else:
        finish(y, first, residual, out, residual_stride, out_stride, TOKENS, TB, ROWS, N)


@triton.jit
def linear_dot_kernel(
    weight_tiles, x_tiles, weight, residual, out, partial, counters, residual_stride, out_stride, eps,
    TOKENS: tl.constexpr, TB: tl.constexpr, N: tl.constexpr, K: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr,
    ROWS: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr, LINES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: ROWS columns of the output over a SPLIT-th of K, on the tensor cores, with W where a product usually has its
    left side. Tiles come by the copy engine, zeros beyond the ends: weight_tiles, x_tiles are descriptors of W, [ROWS, BK] of it
    at a time, and of x, [TB, BK]."""
    tile = tl.program_id(0) // SPLIT
    part = tl.program_id(0) % SPLIT
    first = tile * ROWS
    STEPS: tl.constexpr = ((K + BK - 1) // BK + SPLIT - 1) // SPLIT
    start = part * STEPS * BK
    if LINES > 0:
        row = tl.minimum(first + tl.arange(0, ROWS), N - 1)
        prefetch_rows(weight, row, start, BK, LINES, K)
        if GATED:
            prefetch_rows(weight, row + N, start, BK, LINES, K)
    begin(PDL)
    acc, up, square_sums = multiply(weight_tiles, x_tiles, first, start, N, STEPS, TB, NORM, GATED, ROWS, BK, STAGES)
    if SPLIT > 1:
        tl.static_assert(not GATED)
        share(acc, square_sums, partial, tile * SPLIT + part, ROWS, TB)
        tl.debug_barrier()
        is_last = tl.atomic_add(counters + tile, 1, sem="acq_rel") == SPLIT - 1
        if is_last:
            acc, square_sums = collect(partial, tile * SPLIT, SPLIT, ROWS, TB)
            tl.store(counters + tile, 0)
    else:
        is_last = True
    if is_last:
        if NORM:
            scale = tl.rsqrt(square_sums / K + eps)[None, :]
            acc *= scale
            up *= scale
        if GATED:
            acc = silu(acc) * up
        finish(tl.trans(acc), first, residual, out, residual_stride, out_stride, TOKENS, TB, ROWS, N)


@triton.jit
def multiply(
    weight_tiles, x_tiles, first, start, N,
    STEPS: tl.constexpr, TB: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr,
    ROWS: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """STEPS tiles along K from start on: the products of W's rows from first on, [ROWS, TB]; gated, those of the up projection;
    and with a norm the sums of x's squares, [TB]."""
    acc = tl.zeros((ROWS, TB), tl.float32)
    up = tl.zeros((ROWS, TB), tl.float32)
    squares = tl.zeros((TB, BK), tl.float32)
    for step in tl.range(0, STEPS, num_stages=STAGES):
        at = start + step * BK
        w = weight_tiles.load([first, at])
        x = x_tiles.load([0, at])
        if NORM:
            exact = x.to(tl.float32)
            squares += exact * exact
        acc = tl.dot(w, x.T, acc)
        if GATED:
            up = tl.dot(weight_tiles.load([N + first, at]), x.T, up)
    return acc, up, tl.sum(squares, axis=1)


@triton.jit
def share(acc, square_sums, partial, place, ROWS: tl.constexpr, TB: tl.constexpr):
    """A program's part of the sums to its place in partial: [places, ROWS + 1, TB] float32, the last row for the squares."""
    start = partial + place * ((ROWS + 1) * TB)
    token = tl.arange(0, TB)
    tl.store(start + tl.arange(0, ROWS)[:, None] * TB + token[None, :], acc)
    tl.store(start + ROWS * TB + token, square_sums)


@triton.jit
def collect(partial, place, SPLIT: tl.constexpr, ROWS: tl.constexpr, TB: tl.constexpr):
    """The sums over all parts, always in the same order, so that the last program to arrive gets what any other would."""
    token = tl.arange(0, TB)
    at = tl.arange(0, ROWS)[:, None] * TB + token[None, :]
    acc = tl.zeros((ROWS, TB), tl.float32)
    square_sums = tl.zeros((TB,), tl.float32)
    for part in range(SPLIT):
        start = partial + (place + part) * ((ROWS + 1) * TB)
        acc += tl.load(start + at, cache_modifier=".cg")
        square_sums += tl.load(start + ROWS * TB + token, cache_modifier=".cg")
    return acc, square_sums
