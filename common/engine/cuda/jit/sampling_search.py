"""The filters' thresholds without a sort: for each row the largest logit t such that the tokens at or above it number at least
top_k, or weigh at least top_p of what top_k left.

A bracket [low, high) holds t. A pass over the row takes the sums from each of four pivots up and the bracket's extremes, which
narrows it to less than the distance of two pivots. After the first pass two of them stand close around where t would be if the
sums grew exponentially, and one halves the bracket's floats, so that no distribution takes more than 33 passes. (That pivots
serve in place of sorting is FlashInfer's observation: "Sorting-Free GPU Kernels for LLM Sampling", flashinfer.ai, 2025.) When few
tokens are left in the bracket they are copied together, and later passes are over them alone: usually after three or four passes
for a top_p of a flat distribution, one or two for a top_k or a peaked one.

Ties are equal logits; the CPU sampler's are equal weights, which rounding at a high temperature makes of different logits. Logits
of -inf are never searched: their weight is 0.
"""

import triton
import triton.language as tl

from common.engine.cuda.jit.sampling_draw import LOG2_E
from common.engine.cuda.jit.sampling_logits import from_ordered, load_logits, ordered

MAX_PASSES = tl.constexpr(48)
SLACK = tl.constexpr(1.0 - 2.0**-21)
"""A sum that should be exactly the target may fall short of it by rounding."""
ALL = tl.constexpr(2**30)
LOWEST_FINITE = tl.constexpr(-(2.0 - 2.0**-23) * 2.0**127)


@triton.jit
def above(value):
    """The next float32."""
    return from_ordered(ordered(value) + 1)


@triton.jit
def is_open(low, high):
    return above(low) < high


@triton.jit
def weigh(values, best, rate):
    """What each token adds to the sum that is searched: its weight, or 1 if rate is 0."""
    return tl.exp2((values - best) * rate)


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
    blind = (passes == 0) | (low == LOWEST_FINITE)
    a = tl.where(passes == 0, high - 2.0 * unit, half)
    b = tl.where(blind, high - 4.0 * unit, middle - width / 24.0)
    c = tl.where(blind, high - tl.where(passes == 0, 6.5, 16.0) * unit, middle + width / 24.0)
    d = tl.where(blind, high - tl.where(passes == 0, 10.0, 64.0) * unit, aside)
    return a, b, c, d


@triton.jit
def add_block(values, low, high, best, rate, a, b, c, d, total, sum_a, sum_b, sum_c, sum_d, least, most):
    """The accumulators with a block's share: the bracket's sum, its sums from each pivot up, its extremes."""
    inside = (values >= low) & (values < high)
    weights = tl.where(inside, weigh(values, best, rate), 0.0)
    return (
        total + weights,
        sum_a + (values >= a).to(tl.float32) * weights,
        sum_b + (values >= b).to(tl.float32) * weights,
        sum_c + (values >= c).to(tl.float32) * weights,
        sum_d + (values >= d).to(tl.float32) * weights,
        tl.minimum(least, tl.where(inside, values, float("inf"))),
        tl.maximum(most, tl.where(inside, values, float("-inf"))),
    )


@triton.jit
def summed(total, sum_a, sum_b, sum_c, sum_d, least, most):
    return (
        tl.sum(total, axis=0), tl.sum(sum_a, axis=0), tl.sum(sum_b, axis=0), tl.sum(sum_c, axis=0), tl.sum(sum_d, axis=0),
        tl.min(least, axis=0), tl.max(most, axis=0),
    )  # fmt: skip


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
def target_of(target, passes, counting, goal, total, drop):
    """A share of the weight is known only after the first pass. drop: the weight of ties that top_k did not keep."""
    return tl.where((passes == 0) & (counting == 0), goal * SLACK * (total - drop), target)


@triton.jit
def one_pass(
    logits, stride, work, own, row, few, gathered, blocks, low, high, best, rate, a, b, c, d,
    VOCAB: tl.constexpr, FULL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """add_block over the whole row, or over what was gathered from it; then summed."""
    total = tl.zeros((BLOCK,), tl.float32)
    sum_a, sum_b, sum_c, sum_d = total, total, total, total
    least, most = total + float("inf"), total + float("-inf")
    block = 0
    while block < blocks:
        index = block * BLOCK + tl.arange(0, BLOCK)
        if gathered == 1:  # noqa: SIM108
            values = tl.load(few + index)
        else:
            values = load_logits(logits, stride, work, own, row, index, VOCAB, FULL)
        total, sum_a, sum_b, sum_c, sum_d, least, most = add_block(
            values, low, high, best, rate, a, b, c, d, total, sum_a, sum_b, sum_c, sum_d, least, most
        )
        block += 1
    return summed(total, sum_a, sum_b, sum_c, sum_d, least, most)


@triton.jit
def gather(
    logits, stride, work, own, row, few, low, high,
    VOCAB: tl.constexpr, FULL: tl.constexpr, LANES: tl.constexpr, LAYERS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copies the bracket's logits to few: [LAYERS, LANES], each lane's one below the other, filled up with NaN to whole blocks.
    Returns the layers used; more than LAYERS: they did not fit."""
    lane = tl.arange(0, LANES)
    counts = tl.zeros((LANES,), tl.int32)
    for start in range(0, VOCAB, LANES):
        values = load_logits(logits, stride, work, own, row, start + lane, VOCAB, FULL)
        inside = (values >= low) & (values < high)
        tl.store(few + counts * LANES + lane, values, mask=inside & (counts < LAYERS))
        counts += inside.to(tl.int32)
    layers = tl.max(counts, axis=0)
    layer = 0
    while layer * LANES < tl.minimum(layers, LAYERS) * LANES + BLOCK - LANES:
        tl.store(few + layer * LANES + lane, float("nan"), mask=(counts <= layer) & (layer < LAYERS))
        layer += 1
    tl.debug_barrier()
    return layers


@triton.jit
def find(
    logits, stride, work, own, row, few, low, high, over, reached, target, passes, left, best, scale, counting, goal, drop,
    VOCAB: tl.constexpr, FULL: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr, LAYERS: tl.constexpr,
):  # fmt: skip
    """Narrows a bracket until it holds one value; at least once, since the target may be a share of what it holds. left: at most
    so many tokens are in it. Returns t, the sum above it, the sum with it, the target."""
    rate = tl.where(counting != 0, 0.0, scale)
    unit = tl.where(counting != 0, 1.0, LOG2_E / scale)
    gathered, blocks = 0, (VOCAB + BLOCK - 1) // BLOCK + 0 * passes
    while (passes == 0) | (is_open(low, high) & (passes < MAX_PASSES)):
        if (gathered == 0) & (left <= LANES):
            layers = gather(logits, stride, work, own, row, few, low, high, VOCAB, FULL, LANES, LAYERS, BLOCK)
            blocks = tl.where(layers <= LAYERS, (layers * LANES + BLOCK - 1) // BLOCK, blocks)
            gathered = tl.where(layers <= LAYERS, 1, 2)
        a, b, c, d = choose_pivots(low, high, over, reached, target, passes, unit)
        total, sum_a, sum_b, sum_c, sum_d, least, most = one_pass(
            logits, stride, work, own, row, few, gathered, blocks, low, high, best, rate, a, b, c, d, VOCAB, FULL, BLOCK
        )
        target = target_of(target, passes, counting, goal, total, drop)
        low, high, over, reached = narrow(low, high, over, target, a, b, c, d, total, sum_a, sum_b, sum_c, sum_d, least, most)
        # None of those left adds less than the lowest.
        left = (reached - over) / weigh(low, best, rate)
        passes += 1
    return low, over, reached, target


@triton.jit
def quota_of(low, over, target, best, rate):
    """How many of the tokens at t it takes, at least one."""
    each = tl.maximum(weigh(low, best, rate), 1e-30)
    return tl.maximum(tl.minimum(tl.ceil((target - over) / each), ALL), 1.0).to(tl.int32)
