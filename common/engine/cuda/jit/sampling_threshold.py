"""The kernels of sampling_search. With few rows, narrow_kernel's launches are the first passes, in which each of a row's chunks
has a program; search_kernel, a program per row, does the rest."""

import triton
import triton.language as tl

from common.engine.cuda.jit.sampling_draw import LOG2_E, row_best, scale_of
from common.engine.cuda.jit.sampling_logits import load_logits
from common.engine.cuda.jit.sampling_search import (
    LOWEST_FINITE,
    above,
    add_block,
    choose_pivots,
    find,
    is_open,
    narrow,
    quota_of,
    summed,
    target_of,
    weigh,
)
from common.engine.cuda.jit.sampling_slots import DETERMINISTIC, FILTERED, FLAGS, TOP_K, TOP_P, real, word

FIELDS = tl.constexpr(8)
"""Floats that a bracket takes in memory (low, high, over, reached, target, whether it is open), and a chunk's sums."""


@triton.jit
def is_searched(slot_params, slot, dummy_slot):
    return (slot != dummy_slot) & (word(slot_params, slot, FLAGS) & (FILTERED | DETERMINISTIC) == FILTERED)


@triton.jit
def first_search(slot_params, slot, best, scale):
    """top_k's, or else top_p's: (whether it counts, goal, target, rate, unit) as sampling_search.find has them."""
    top_k = word(slot_params, slot, TOP_K)
    counting = (top_k > 0).to(tl.int32)
    goal = tl.where(top_k > 0, top_k.to(tl.float32), real(slot_params, slot, TOP_P))
    target = tl.where(top_k > 0, goal, 0.0)
    return counting, goal, target, tl.where(top_k > 0, 0.0, scale), tl.where(top_k > 0, 1.0, LOG2_E / scale)


@triton.jit
def bracket_after(
    passes, brackets, parts, rows, row, chunks, counting, goal, unit, CHUNKS: tl.constexpr
):  # fmt: skip
    """What the first passes, at least one, have left of a row's bracket: the one that the last of them began with, narrowed by
    what its chunks found."""
    half = ((passes - 1) % 2) * rows
    kept = brackets + (half + row) * FIELDS
    low, high, over, reached = tl.load(kept), tl.load(kept + 1), tl.load(kept + 2), tl.load(kept + 3)
    target = tl.load(kept + 4)
    if tl.load(kept + 5) > 0.0:
        chunk = tl.arange(0, CHUNKS)
        part = parts + ((half + row) * chunks + chunk) * FIELDS
        inside = chunk < chunks
        total, sum_a, sum_b, sum_c, sum_d, least, most = summed(
            tl.load(part, mask=inside, other=0.0),
            tl.load(part + 1, mask=inside, other=0.0),
            tl.load(part + 2, mask=inside, other=0.0),
            tl.load(part + 3, mask=inside, other=0.0),
            tl.load(part + 4, mask=inside, other=0.0),
            tl.load(part + 5, mask=inside, other=float("inf")),
            tl.load(part + 6, mask=inside, other=float("-inf")),
        )
        a, b, c, d = choose_pivots(low, high, over, reached, target, passes - 1, unit)
        target = target_of(target, passes - 1, counting, goal, total, 0.0)
        low, high, over, reached = narrow(low, high, over, target, a, b, c, d, total, sum_a, sum_b, sum_c, sum_d, least, most)
    return low, high, over, reached, target


@triton.jit
def store_sums(part, total, sum_a, sum_b, sum_c, sum_d, least, most):
    tl.store(part, total)
    tl.store(part + 1, sum_a)
    tl.store(part + 2, sum_b)
    tl.store(part + 3, sum_c)
    tl.store(part + 4, sum_d)
    tl.store(part + 5, least)
    tl.store(part + 6, most)


@triton.jit
def store_bracket(kept, low, high, over, reached, target, open):
    tl.store(kept, low)
    tl.store(kept + 1, high)
    tl.store(kept + 2, over)
    tl.store(kept + 3, reached)
    tl.store(kept + 4, target)
    tl.store(kept + 5, open.to(tl.float32))


@triton.jit(do_not_specialize=["dummy_slot", "rows", "passes"])
def narrow_kernel(
    logits, stride, work, processed, slots, slot_params, part_max, brackets, parts, passes, rows, dummy_slot, vocab,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """One program: CHUNK logits of a row in its next pass. passes: how many there have been. Of brackets and parts, each for
    `rows` rows, there are two, taken in turn."""
    row, chunks = tl.program_id(1), tl.num_programs(0)
    slot = tl.load(slots + row)
    min_p_alone = (word(slot_params, slot, TOP_K) <= 0) & (real(slot_params, slot, TOP_P) >= 1.0)
    if min_p_alone | (is_searched(slot_params, slot, dummy_slot) == 0):
        return
    _, best = row_best(part_max, row, chunks, CHUNKS)
    counting, goal, target, rate, unit = first_search(slot_params, slot, best, scale_of(slot_params, slot))
    low, high, over, reached = best - best + LOWEST_FINITE, above(best), best - best, best - best
    if passes > 0:
        low, high, over, reached, target = bracket_after(passes, brackets, parts, rows, row, chunks, counting, goal, unit, CHUNKS)
    open = (passes == 0) | is_open(low, high)
    at = (passes % 2) * rows + row
    if tl.program_id(0) == 0:
        store_bracket(brackets + at * FIELDS, low, high, over, reached, target, open)
    if open:
        own = 0
        if FULL:
            own = tl.load(processed + row)
        values = load_logits(logits, stride, work, own, row, tl.program_id(0) * CHUNK + tl.arange(0, CHUNK), vocab, FULL)
        a, b, c, d = choose_pivots(low, high, over, reached, target, passes, unit)
        zero = tl.zeros((CHUNK,), tl.float32)
        total, sum_a, sum_b, sum_c, sum_d, least, most = add_block(
            values, low, high, best, rate, a, b, c, d, zero, zero, zero, zero, zero, zero + float("inf"), zero + float("-inf")
        )
        total, sum_a, sum_b, sum_c, sum_d, least, most = summed(total, sum_a, sum_b, sum_c, sum_d, least, most)
        store_sums(parts + (at * chunks + tl.program_id(0)) * FIELDS, total, sum_a, sum_b, sum_c, sum_d, least, most)


@triton.jit(do_not_specialize=["dummy_slot", "rows", "done"])
def search_kernel(
    logits, stride, work, processed, slots, slot_params, part_max, brackets, parts, few, thresholds, quotas, done, rows,
    dummy_slot, chunks,
    VOCAB: tl.constexpr, CHUNKS: tl.constexpr, FULL: tl.constexpr, BLOCK: tl.constexpr,
    LANES: tl.constexpr, LAYERS: tl.constexpr,
):  # fmt: skip
    """One program: one row's threshold, and how many of the tokens at it are kept, those with the lowest ids. done: passes that
    narrow_kernel has made."""
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    if is_searched(slot_params, slot, dummy_slot) == 0:
        return
    own = 0
    if FULL:
        own = tl.load(processed + row)
    _, best = row_best(part_max, row, chunks, CHUNKS)
    scale, top_p = scale_of(slot_params, slot), real(slot_params, slot, TOP_P)
    counting, goal, target, rate, unit = first_search(slot_params, slot, best, scale)
    searches = counting + (top_p < 1.0).to(tl.int32)
    low, high, over, reached = best - best + LOWEST_FINITE, above(best), best - best, best - best
    drop, left, passes, both, quota = best - best, best - best + float("inf"), done, counting, 0 * slot
    if (done > 0) & (searches > 0):
        low, high, over, reached, target = bracket_after(done, brackets, parts, rows, row, chunks, counting, goal, unit, CHUNKS)
        left = (reached - over) / weigh(low, best, rate)
    while searches > 0:
        floor, most = low, quota
        low, over, reached, target = find(
            logits, stride, work, own, row, few + row.to(tl.int64) * LAYERS * LANES, low, high, over, reached, target,
            passes, left, best, scale, counting, goal, drop, VOCAB, FULL, BLOCK, LANES, LAYERS,
        )  # fmt: skip
        quota = quota_of(low, over, target, best, tl.where(counting != 0, 0.0, scale))
        quota = tl.where((counting == 0) & (both != 0) & (low == floor), tl.minimum(quota, most), quota)
        # top_p goes on where top_k ended: what is left is what it counted, of which some ties at the end are not kept.
        drop = (reached - over - quota.to(tl.float32)) * weigh(low, best, scale)
        left, high, over, reached, target = reached, above(best), best - best, best - best, best - best
        counting, goal, passes = 0 * counting, top_p, 0 * passes
        searches -= 1
    # Without a search, for a min_p alone, low is below all that has weight.
    tl.store(thresholds + row, low)
    tl.store(quotas + row, quota)
