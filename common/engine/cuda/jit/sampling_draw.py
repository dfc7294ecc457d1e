"""The draw: each row's best token, or the inverse of its cumulative distribution, in the order of token ids, at one number.

A row is cut into chunks, one program each, so that a single row is not one multiprocessor's work. stats_kernel takes a chunk's
best token and weight; where filters apply, sampling_search finds the threshold and tally_kernel the weight they leave of a
chunk; pick_kernel finds the chunk, then the token in it.
"""

import triton
import triton.language as tl
from triton.language.random import philox_impl

from common.engine.cuda.jit.sampling_logits import load_logits
from common.engine.cuda.jit.sampling_slots import (
    COMPLETION,
    DETERMINISTIC,
    FILTERED,
    FLAGS,
    MIN_P,
    OUTPUT_INDEX,
    SEED,
    TEMPERATURE,
    real,
    word,
)

LOG2_E = tl.constexpr(1.4426950408889634)
NONE = tl.constexpr(2**31 - 1)


@triton.jit
def scale_of(slot_params, slot):
    """A token's weight is 2 to the (its logit - the best one) * scale."""
    return LOG2_E / real(slot_params, slot, TEMPERATURE)


@triton.jit(do_not_specialize=["dummy_slot"])
def stats_kernel(
    logits, stride, work, processed, slots, slot_params, part_max, part_id, part_sum, dummy_slot, vocab,
    CHUNK: tl.constexpr, GREEDY: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """One program: CHUNK logits of a row: the maximum, its first id and, unless GREEDY, the weights' sum relative to it."""
    row = tl.program_id(1)
    slot = tl.load(slots + row)
    if slot == dummy_slot:
        return
    own = 0
    if FULL:
        own = tl.load(processed + row)
    ids = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    values = load_logits(logits, stride, work, own, row, ids, vocab, FULL)
    most = tl.max(values, axis=0)
    part = row * tl.num_programs(0) + tl.program_id(0)
    tl.store(part_max + part, most)
    tl.store(part_id + part, tl.min(tl.where(values == most, ids, NONE), axis=0))
    if not GREEDY:
        weights = tl.exp2((values - tl.where(most == float("-inf"), 0.0, most)) * scale_of(slot_params, slot))
        tl.store(part_sum + part, tl.sum(weights, axis=0))


@triton.jit
def row_best(part_max, row, chunks, CHUNKS: tl.constexpr):
    """The chunks' maxima and theirs."""
    chunk = tl.arange(0, CHUNKS)
    most = tl.load(part_max + row * chunks + chunk, mask=chunk < chunks, other=float("-inf"))
    return most, tl.max(most, axis=0)


@triton.jit(do_not_specialize=["dummy_slot"])
def tally_kernel(
    logits, stride, work, processed, slots, slot_params, part_max, thresholds, part_sum, part_ties, dummy_slot, vocab,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """One program: CHUNK logits of a filtered row: the weight above the threshold, and how many tokens are at it."""
    row = tl.program_id(1)
    slot = tl.load(slots + row)
    if (slot == dummy_slot) | (word(slot_params, slot, FLAGS) & (FILTERED | DETERMINISTIC) != FILTERED):
        return
    own = 0
    if FULL:
        own = tl.load(processed + row)
    most, best = row_best(part_max, row, tl.num_programs(0), CHUNKS)
    ids = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    values = load_logits(logits, stride, work, own, row, ids, vocab, FULL)
    weights = tl.exp2((values - best) * scale_of(slot_params, slot))
    threshold = tl.load(thresholds + row)
    enough = weights >= real(slot_params, slot, MIN_P)
    part = row * tl.num_programs(0) + tl.program_id(0)
    tl.store(part_sum + part, tl.sum(tl.where(enough & (values > threshold), weights, 0.0), axis=0))
    tl.store(part_ties + part, tl.sum((enough & (values == threshold)).to(tl.int32), axis=0))


@triton.jit
def uniform(slot_params, slot):
    """In (0, 1), float64: common/engine/philox.py's number for this slot's next token."""
    zero = tl.zeros((1,), tl.uint32)
    counter = zero + word(slot_params, slot, OUTPUT_INDEX).to(tl.uint32, bitcast=True)
    stream = zero + word(slot_params, slot, COMPLETION).to(tl.uint32, bitcast=True)
    low = zero + word(slot_params, slot, SEED).to(tl.uint32, bitcast=True)
    high = zero + word(slot_params, slot, SEED + 1).to(tl.uint32, bitcast=True)
    first, _, _, _ = philox_impl(counter, stream, zero, zero, low, high)
    return tl.sum((first.to(tl.float64) + 0.5) * 2.0**-32, axis=0)


@triton.jit
def chunk_of(part_sum, part_ties, most, best, scale, at_threshold, quota, filtered, uniform, row, chunks, CHUNKS: tl.constexpr):
    """Which chunk the draw ends in, the weight before it, the weight to reach, and how many ties are still kept from there on."""
    chunk = tl.arange(0, CHUNKS)
    inside = chunk < chunks
    sums = tl.load(part_sum + row * chunks + chunk, mask=inside, other=0.0).to(tl.float64)
    if filtered:
        ties = tl.load(part_ties + row * chunks + chunk, mask=inside, other=0)
        kept = tl.minimum(tl.maximum(quota - (tl.cumsum(ties, axis=0) - ties), 0), ties)
        sums += kept.to(tl.float64) * at_threshold
    else:
        ties = tl.zeros((CHUNKS,), tl.int32)
        sums *= tl.exp2((most - best) * scale).to(tl.float64)
    cumulative = tl.cumsum(sums, axis=0)
    target = tl.sum(sums, axis=0) * uniform
    index = tl.sum((inside & (cumulative <= target)).to(tl.int32), axis=0)
    # Rounding must not lead past the last chunk that has any weight.
    index = tl.minimum(index, tl.max(tl.where(sums > 0.0, chunk, 0), axis=0))
    before = tl.sum(tl.where(chunk < index, sums, 0.0), axis=0)
    return index, before, target, quota - tl.sum(tl.where(chunk < index, ties, 0), axis=0)


@triton.jit
def token_of(values, ids, weights, threshold, quota, min_p, before, target):
    """The first token whose cumulative weight is above the target, else the last that has any weight; NONE if none has."""
    tied = values == threshold
    kept = (values > threshold) | (tied & (tl.cumsum(tied.to(tl.int32), axis=0) <= quota))
    weights = tl.where(kept & (weights >= min_p), weights, 0.0)
    cumulative = before + tl.cumsum(weights.to(tl.float64), axis=0)
    token = tl.min(tl.where((cumulative > target) & (weights > 0.0), ids, NONE), axis=0)
    last = tl.max(tl.where(weights > 0.0, ids, -1), axis=0)
    return tl.where((token == NONE) & (last >= 0), last, token)


@triton.jit(do_not_specialize=["dummy_slot"])
def pick_kernel(
    logits, stride, work, processed, slots, slot_params, part_max, part_id, part_sum, part_ties, thresholds, quotas, tokens,
    dummy_slot, vocab, chunks, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, GREEDY: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """One program: one row's token. A dummy row's is 0, which is one to go on with."""
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    if slot == dummy_slot:
        tl.store(tokens + row, 0)
        return
    most, best = row_best(part_max, row, chunks, CHUNKS)
    chunk = tl.arange(0, CHUNKS)
    first = tl.load(part_id + row * chunks + chunk, mask=(chunk < chunks) & (most == best), other=NONE)
    token = tl.min(first, axis=0)
    if not GREEDY:
        flags = word(slot_params, slot, FLAGS)
        if flags & DETERMINISTIC == 0:
            filtered = flags & FILTERED != 0
            scale = scale_of(slot_params, slot)
            threshold = tl.load(thresholds + row, mask=filtered, other=float("-inf"))
            quota = tl.load(quotas + row, mask=filtered, other=NONE)
            at_threshold = tl.exp2((threshold - best) * scale).to(tl.float64)
            index, before, target, quota = chunk_of(
                part_sum,
                part_ties,
                most,
                best,
                scale,
                at_threshold,
                quota,
                filtered,
                uniform(slot_params, slot),
                row,
                chunks,
                CHUNKS,
            )
            own = 0
            if FULL:
                own = tl.load(processed + row)
            ids = index * CHUNK + tl.arange(0, CHUNK)
            values = load_logits(logits, stride, work, own, row, ids, vocab, FULL)
            weights = tl.exp2((values - best) * scale)
            drawn = token_of(values, ids, weights, threshold, quota, real(slot_params, slot, MIN_P), before, target)
            token = tl.where(drawn == NONE, token, drawn)
    # NaN logits have no best one.
    tl.store(tokens + row, tl.where(token < vocab, token, 0))
