"""Attention of one new token per request over its pages: flash-decoding (Dao, Haziza, Massa and Sizov, 2023), which is
FlashAttention's running softmax (Milakov and Gimelshein, arXiv:1805.02867; Dao, arXiv:2307.08691) over parts of the sequence that
several programs take and the last of them to finish adds up.

A program takes one KV head of one request, with all the query heads that share it, over one part of the request's pages.
"""

import triton
import triton.language as tl

from common.engine.cuda.jit.elementwise import begin, prefetch


@triton.jit
def prefetch_page(pool, start, token_stride, PAGE_SIZE: tl.constexpr, D: tl.constexpr):
    """Sends for a page's rows of one head."""
    row = start + tl.arange(0, PAGE_SIZE)[:, None] * token_stride
    prefetch(pool + row + tl.arange(0, D // 64)[None, :] * 64)


@triton.jit
def join(acc, top, total, acc2, top2, total2):
    """Two parts' sums as of one: acc [ROWS, D], weighted by exp2(score - top); top, total [ROWS]."""
    highest = tl.maximum(top, top2)
    scale, scale2 = tl.exp2(top - highest), tl.exp2(top2 - highest)
    return acc * scale[:, None] + acc2 * scale2[:, None], highest, total * scale + total2 * scale2


@triton.jit(do_not_specialize=["split", "least"])
def decode_attention_kernel(
    q, k, v, block_tables, seq_lens, out, partial, counters,
    q_stride, page_stride, token_stride, table_stride, out_stride, scale, split, least,
    GROUP: tl.constexpr, ROWS: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, PAGE_SIZE: tl.constexpr,
    IS_SPLIT: tl.constexpr, AHEAD: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """scale: of the scores, in powers of two. A request's pages are cut into at most split parts of at least `least` pages.

    Before it waits for the kernel before it, a program reads lengths, tables and AHEAD of its pages, to L2: those are older, but
    for the newest token, and what L2 holds is what memory holds. partial: [pairs, split, GROUP, D + 2] float32.
    """
    head = tl.program_id(0) % HKV
    part = tl.program_id(0) // HKV % split
    request = tl.program_id(0) // HKV // split
    length = tl.load(seq_lens + request)
    pages = (length + PAGE_SIZE - 1) // PAGE_SIZE
    each = tl.maximum((pages + split - 1) // split, least)
    parts = (pages + each - 1) // each
    first = part * each
    last = tl.minimum(first + each, pages)
    table = block_tables + request * table_stride
    for ahead in tl.static_range(AHEAD):
        if first + ahead < last:
            start = tl.load(table + first + ahead).to(tl.int64) * page_stride + head * D
            prefetch_page(k, start, token_stride, PAGE_SIZE, D)
            prefetch_page(v, start, token_stride, PAGE_SIZE, D)
    begin(PDL)
    if first < last:
        row = tl.arange(0, ROWS)
        is_row = row < GROUP
        heads = (head * GROUP + row)[:, None] * D + tl.arange(0, D)[None, :]
        queries = tl.load(q + request.to(tl.int64) * q_stride + heads, mask=is_row[:, None], other=0.0)
        acc, top, total = attend(
            queries, k, v, table, first, last, length, head, page_stride, token_stride, scale, ROWS, D, PAGE_SIZE, STAGES
        )  # fmt: skip
        is_last = parts == 1
        if IS_SPLIT:  # noqa: SIM102 - the outer is decided when the kernel is compiled
            if parts > 1:
                pair = request * HKV + head
                share(acc, top, total, partial, pair * split + part, GROUP, ROWS, D)
                tl.debug_barrier()
                is_last = tl.atomic_add(counters + pair, 1, sem="acq_rel") == parts - 1
                if is_last:
                    acc, top, total = collect(partial, pair * split, parts, GROUP, ROWS, D)
                    tl.store(counters + pair, 0)
        if is_last:
            attended = (acc / total[:, None]).to(out.dtype.element_ty)
            tl.store(out + request.to(tl.int64) * out_stride + heads, attended, mask=is_row[:, None])


@triton.jit
def attend(
    queries, k, v, table, first, last, length, head, page_stride, token_stride, scale,
    ROWS: tl.constexpr, D: tl.constexpr, PAGE_SIZE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """queries: [ROWS, D], over the pages first to last of the table -> sums as join() takes them."""
    acc = tl.zeros((ROWS, D), tl.float32)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    token = tl.arange(0, PAGE_SIZE)
    within = token[:, None] * token_stride + tl.arange(0, D)[None, :]
    for page in tl.range(first, last, num_stages=STAGES):
        start = tl.load(table + page).to(tl.int64) * page_stride + head * D
        is_there = page * PAGE_SIZE + token < length
        keys = tl.load(k + start + within, mask=is_there[:, None], other=0.0)
        scores = tl.where(is_there[None, :], tl.dot(queries, keys.T) * scale, float("-inf"))
        highest = tl.maximum(top, tl.max(scores, axis=1))
        weights = tl.exp2(scores - highest[:, None])
        shrunk = tl.exp2(top - highest)
        values = tl.load(v + start + within, mask=is_there[:, None], other=0.0)
        acc = tl.dot(weights.to(values.dtype), values, acc * shrunk[:, None])
        total = total * shrunk + tl.sum(weights, axis=1)
        top = highest
    return acc, top, total


@triton.jit
def share(acc, top, total, partial, place, GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr):
    """A program's sums to its place."""
    row = tl.arange(0, ROWS)
    at = partial + (place.to(tl.int64) * GROUP + row) * (D + 2)
    tl.store(at[:, None] + tl.arange(0, D)[None, :], acc, mask=row[:, None] < GROUP)
    tl.store(at + D, top, mask=row < GROUP)
    tl.store(at + D + 1, total, mask=row < GROUP)


@triton.jit
def collect(partial, place, parts, GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr):
    """All parts' sums, always joined in the same order, so that the last program to arrive gets what any other would."""
    row = tl.arange(0, ROWS)
    acc = tl.zeros((ROWS, D), tl.float32)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    for part in range(parts):
        at = partial + ((place + part).to(tl.int64) * GROUP + row) * (D + 2)
        acc2 = tl.load(
            at[:, None] + tl.arange(0, D)[None, :], mask=row[:, None] < GROUP, other=0.0, cache_modifier=".cg"
        )  # fmt: skip
        top2 = tl.load(at + D, mask=row < GROUP, other=0.0, cache_modifier=".cg")
        total2 = tl.load(at + D + 1, mask=row < GROUP, other=0.0, cache_modifier=".cg")
        acc, top, total = join(acc, top, total, acc2, top2, total2)
    return acc, top, total
