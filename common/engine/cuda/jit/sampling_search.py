"""The filters' thresholds without a sort: for each row the largest logit t such that the tokens at or above it number at least
top_k, or weigh at least top_p of what top_k left.

A bracket [low, high) holds t. A pass over the row takes the weight above each of four pivots in it and the bracket's extremes,
which narrows it to less than the distance of two pivots. After the first pass two of them stand close around where t would be if
weights fell off exponentially, and one halves the bracket's floats, so that no distribution takes more than 33 passes. (That
pivots serve in place of sorting is FlashInfer's observation: "Sorting-Free GPU Kernels for LLM Sampling", flashinfer.ai, 2025.)
When few tokens are left in the bracket they are copied together, and what remains is done on them alone.

Ties are equal logits; the CPU sampler's are equal weights, which at a high temperature rounding makes of different logits.
"""

import triton
import triton.language as tl

from common.engine.cuda.jit.sampling_draw import LOG2_E, row_best, scale_of
from common.engine.cuda.jit.sampling_logits import from_ordered, load_logits, ordered
from common.engine.cuda.jit.sampling_slots import DETERMINISTIC, FILTERED, FLAGS, TOP_K, TOP_P, real, word

MAX_PASSES = tl.constexpr(48)
SLACK = tl.constexpr(1.0 - 2.0**-21)
"""A sum that should be exactly the target may fall short of it by rounding."""
ALL = tl.constexpr(2**30)


@triton.jit
def above(value):
    """The next float32."""
    return from_ordered(ordered(value) + 1)


@triton.jit
def weigh(values, low, high, best, scale, COUNTING: tl.constexpr):
    """What each token in the bracket adds to the sum that is searched: 1, or its weight."""
    inside = (values >= low) & (values < high)
    if COUNTING:
        return tl.where(inside, 1.0, 0.0)
    else:
        return tl.where(inside, tl.exp2((values - best) * scale), 0.0)


@triton.jit
def choose_pivots(low, high, over, reached, target, passes, unit):
    """over, reached: the sums down to high and down to low. unit: one nat, in logits."""
    key = ordered(low).to(tl.int64)
    half = from_ordered((key + (ordered(high).to(tl.int64) - key) // 2).to(tl.int32))
    share = (target - over) / (reached - over)
    if over > 0.0:
        share = tl.log(target / over) / tl.log(reached / over)
    width = high - low
    middle = high - width * tl.minimum(tl.maximum(share, 0.0), 1.0)
    aside = middle + tl.where(share < 0.5, -width, width) / 6.0
    blind = (passes == 0) | (low == float("-inf"))
    a = tl.where(passes == 0, high - 1.5 * unit, half)
    b = tl.where(blind, high - 4.0 * unit, middle - width / 24.0)
    c = tl.where(blind, high - tl.where(passes == 0, 7.5, 16.0) * unit, middle + width / 24.0)
    d = tl.where(blind, high - tl.where(passes == 0, 12.0, 64.0) * unit, aside)
    return a, b, c, d


@triton.jit
def add_block(values, low, high, best, scale, a, b, c, d, total, sum_a, sum_b, sum_c, sum_d, least, most, COUNTING: tl.constexpr):
    """The accumulators with a block's share: the bracket's sum, the sums from each pivot up, the bracket's extremes."""
    weights = weigh(values, low, high, best, scale, COUNTING)
    inside = (values >= low) & (values < high)
    return (
        total + weights,
        sum_a + tl.where(values >= a, weights, 0.0),
        sum_b + tl.where(values >= b, weights, 0.0),
        sum_c + tl.where(values >= c, weights, 0.0),
        sum_d + tl.where(values >= d, weights, 0.0),
        tl.minimum(least, tl.where(inside, values, float("inf"))),
        tl.maximum(most, tl.where(inside, values, float("-inf"))),
    )


@triton.jit
def narrow_by(pivot, part, over, target, bracket_low, bracket_high, bracket_over, bracket_reached):
    """The bracket cut at one pivot. part: the sum in the old bracket from the pivot up; over: the sum above the old bracket."""
    here = over + part
    enough = here >= target
    return (
        tl.where(enough, tl.maximum(bracket_low, pivot), bracket_low),
        tl.where(enough, bracket_high, tl.minimum(bracket_high, pivot)),
        tl.where(enough, bracket_over, tl.maximum(bracket_over, here)),
        tl.where(enough, tl.minimum(bracket_reached, here), bracket_reached),
    )


@triton.jit
def narrow(low, high, over, target, a, b, c, d, total, sum_a, sum_b, sum_c, sum_d, least, most):
    """The new low, high, over and reached. An empty bracket (rounding may say so) is closed at its low end."""
    empty = least > most
    lo, hi, top, all = tl.maximum(low, least), tl.minimum(high, above(most)), over, over + total
    lo, hi, top, all = narrow_by(a, sum_a, over, target, lo, hi, top, all)
    lo, hi, top, all = narrow_by(b, sum_b, over, target, lo, hi, top, all)
    lo, hi, top, all = narrow_by(c, sum_c, over, target, lo, hi, top, all)
    lo, hi, top, all = narrow_by(d, sum_d, over, target, lo, hi, top, all)
    return tl.where(empty, low, lo), tl.where(empty, low, hi), top, all


@triton.jit
def one_pass(
    logits, stride, work, own, row, low, high, best, scale, a, b, c, d,
    VOCAB: tl.constexpr, COUNTING: tl.constexpr, FULL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """add_block over the whole row, then summed."""
    total = tl.zeros((BLOCK,), tl.float32)
    sum_a, sum_b, sum_c, sum_d = total, total, total, total
    least, most = total + float("inf"), total + float("-inf")
    for start in range(0, VOCAB, BLOCK):
        values = load_logits(logits, stride, work, own, row, start + tl.arange(0, BLOCK), VOCAB, FULL)
        total, sum_a, sum_b, sum_c, sum_d, least, most = add_block(
            values, low, high, best, scale, a, b, c, d, total, sum_a, sum_b, sum_c, sum_d, least, most, COUNTING
        )
    return summed(total, sum_a, sum_b, sum_c, sum_d, least, most)


@triton.jit
def summed(total, sum_a, sum_b, sum_c, sum_d, least, most):
    return (
        tl.sum(total, axis=0), tl.sum(sum_a, axis=0), tl.sum(sum_b, axis=0), tl.sum(sum_c, axis=0), tl.sum(sum_d, axis=0),
        tl.min(least, axis=0), tl.max(most, axis=0),
    )  # fmt: skip


@triton.jit
def gather_few(
    logits, stride, work, own, row, low, high, few,
    VOCAB: tl.constexpr, FULL: tl.constexpr, BLOCK: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """The logits in the bracket, in a block of FEW filled up with NaN, by way of few: [FEW] of the row's own."""
    count = 0
    for start in range(0, VOCAB, BLOCK):
        values = load_logits(logits, stride, work, own, row, start + tl.arange(0, BLOCK), VOCAB, FULL)
        inside = ((values >= low) & (values < high)).to(tl.int32)
        place = count + tl.cumsum(inside, axis=0) - 1
        tl.store(few + place, values, mask=(inside != 0) & (place < FEW))
        count += tl.sum(inside, axis=0)
    tl.debug_barrier()
    index = tl.arange(0, FEW)
    return tl.load(few + index, mask=index < count, other=float("nan"))


@triton.jit
def find(
    logits, stride, work, own, row, few, best, scale, floor, drop, goal,
    VOCAB: tl.constexpr, COUNTING: tl.constexpr, FULL: tl.constexpr, BLOCK: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """(t, the sum above it, the sum with it, the target). floor: where t cannot be below; goal: a count, or a share of the weight
    down to floor, less drop."""
    low, high = floor, above(best)
    over, reached, target, left = best - best, best - best, best - best, best - best + float("inf")
    unit = best - best + 1.0
    if COUNTING:
        target += goal
    else:
        unit = LOG2_E / scale
    passes = 0
    # Once at least, even if floor leaves only its ties: the target is a share of a sum.
    while (passes == 0) | ((above(low) < high) & (left > FEW // 2) & (passes < MAX_PASSES)):
        a, b, c, d = choose_pivots(low, high, over, reached, target, passes, unit)
        total, sum_a, sum_b, sum_c, sum_d, least, most = one_pass(
            logits, stride, work, own, row, low, high, best, scale, a, b, c, d, VOCAB, COUNTING, FULL, BLOCK
        )
        if not COUNTING:
            target = tl.where(passes == 0, goal * SLACK * (total - drop), target)
        low, high, over, reached = narrow(low, high, over, target, a, b, c, d, total, sum_a, sum_b, sum_c, sum_d, least, most)
        # At most so many tokens are left in the bracket: none of them adds less than the lowest.
        left = (reached - over) / weigh(low, low, high, best, scale, COUNTING)
        passes += 1
    if above(low) < high:
        values = gather_few(logits, stride, work, own, row, low, high, few, VOCAB, FULL, BLOCK, FEW)
        zero = tl.zeros((FEW,), tl.float32)
        while (above(low) < high) & (passes < MAX_PASSES):
            a, b, c, d = choose_pivots(low, high, over, reached, target, passes, unit)
            total, sum_a, sum_b, sum_c, sum_d, least, most = add_block(
                values, low, high, best, scale, a, b, c, d, zero, zero, zero, zero, zero, zero + float("inf"),
                zero + float("-inf"), COUNTING,
            )  # fmt: skip
            total, sum_a, sum_b, sum_c, sum_d, least, most = summed(total, sum_a, sum_b, sum_c, sum_d, least, most)
            low, high, over, reached = narrow(low, high, over, target, a, b, c, d, total, sum_a, sum_b, sum_c, sum_d, least, most)
            passes += 1
    return low, over, reached, target


@triton.jit
def quota_of(low, over, target, best, scale, COUNTING: tl.constexpr):
    """How many of the tokens at t it takes, at least one."""
    each = weigh(low, low, above(low), best, scale, COUNTING)
    return tl.maximum(tl.minimum(tl.ceil((target - over) / tl.maximum(each, 1e-30)), ALL), 1.0).to(tl.int32)


@triton.jit(do_not_specialize=["dummy_slot"])
def search_kernel(
    logits, stride, work, processed, slots, slot_params, part_max, thresholds, quotas, few, dummy_slot, chunks,
    VOCAB: tl.constexpr, CHUNKS: tl.constexpr, FULL: tl.constexpr, BLOCK: tl.constexpr, FEW: tl.constexpr,
):  # fmt: skip
    """One program: one row's threshold, and how many of the tokens at it are kept, those with the lowest ids."""
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    if (slot == dummy_slot) | (word(slot_params, slot, FLAGS) & (FILTERED | DETERMINISTIC) != FILTERED):
        return
    own = 0
    if FULL:
        own = tl.load(processed + row)
    _, best = row_best(part_max, row, chunks, CHUNKS)
    scale = scale_of(slot_params, slot)
    top_k, top_p = word(slot_params, slot, TOP_K), real(slot_params, slot, TOP_P)
    threshold, quota, drop = best - best + float("-inf"), 0, best - best
    if top_k > 0:
        threshold, over, reached, target = find(
            logits, stride, work, own, row, few + row * FEW, best, scale, threshold, drop, top_k.to(tl.float32),
            VOCAB, True, FULL, BLOCK, FEW,
        )  # fmt: skip
        quota = quota_of(threshold, over, target, best, scale, True)
        drop = (reached - over - quota.to(tl.float32)) * tl.exp2((threshold - best) * scale)
    if top_p < 1.0:
        floor, most = threshold, quota
        threshold, over, reached, target = find(
            logits, stride, work, own, row, few + row * FEW, best, scale, floor, drop, top_p,
            VOCAB, False, FULL, BLOCK, FEW,
        )  # fmt: skip
        quota = quota_of(threshold, over, target, best, scale, False)
        quota = tl.where((top_k > 0) & (threshold == floor), tl.minimum(quota, most), quota)
    tl.store(thresholds + row, threshold)
    tl.store(quotas + row, quota)
