"""Before and beside the draw: penalties, masks and bias make a row's processed logits; log-probabilities are of the raw ones."""

import triton
import triton.language as tl

from common.engine.cuda.jit.sampling_slots import (
    FLAGS,
    FREQUENCY,
    LOGPROBS,
    MIN_TOKENS,
    NUM_BIAS,
    NUM_STOP,
    OUTPUT_INDEX,
    PENALIZED,
    PRESENCE,
    REPETITION,
    real,
    word,
)

LOWEST = tl.constexpr(-(2**63))


@triton.jit
def load_logits(logits, stride, work, processed, row, ids, vocab, FULL: tl.constexpr):
    """float32, -inf past the vocabulary. processed: whether the row's logits are those in work; FULL: whether any may be."""
    inside = ids < vocab
    raw = inside
    if FULL:
        raw = inside & (processed == 0)
    values = tl.load(logits + row.to(tl.int64) * stride + ids, mask=raw, other=float("-inf")).to(tl.float32)
    if FULL:
        own = tl.load(work + row.to(tl.int64) * vocab + ids, mask=inside & (processed != 0), other=float("-inf"))
        values = tl.where(processed != 0, own, values)
    return values


@triton.jit
def ordered(values):
    """An int32 that orders as the float32 does; -0.0 as 0.0."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def from_ordered(key):
    return tl.where(key >= 0, key, key ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["dummy_slot"])
def process_kernel(
    logits, stride, work, processed, slots, slot_params, history, mask, mask_stride, dummy_slot, vocab, CHUNK: tl.constexpr
):  # fmt: skip
    """One program: CHUNK logits of a row; only rows that need it are copied to work. A grammar's mask comes before the bias,
    which is added to its -inf in vain."""
    row = tl.program_id(1)
    slot = tl.load(slots + row)
    masked = tl.load(mask + slot * mask_stride + mask_stride - 1) != 0
    penalized = (word(slot_params, slot, FLAGS) & PENALIZED) != 0
    stops = (word(slot_params, slot, NUM_STOP) > 0) & (
        word(slot_params, slot, OUTPUT_INDEX) < word(slot_params, slot, MIN_TOKENS)
    )
    needed = (slot != dummy_slot) & (masked | penalized | stops | (word(slot_params, slot, NUM_BIAS) > 0))
    if tl.program_id(0) == 0:
        tl.store(processed + row, needed.to(tl.int32))
    if needed == 0:
        return
    ids = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    inside = ids < vocab
    values = tl.load(logits + row.to(tl.int64) * stride + ids, mask=inside, other=0.0).to(tl.float32)
    past = tl.load(history + slot.to(tl.int64) * vocab + ids, mask=inside & penalized, other=0)
    repetition = real(slot_params, slot, REPETITION)
    values = tl.where(past > 0, tl.where(values > 0, values / repetition, values * repetition), values)
    count = past >> 1
    cost = count.to(tl.float32) * real(slot_params, slot, FREQUENCY) + real(slot_params, slot, PRESENCE)
    values = tl.where(count > 0, values - cost, values)
    words = tl.load(mask + slot * mask_stride + ids // 32, mask=inside & masked, other=-1)
    values = tl.where((words >> (ids % 32)) & 1 != 0, values, float("-inf"))
    tl.store(work + row.to(tl.int64) * vocab + ids, values, mask=inside)


@triton.jit
def edit_kernel(
    work, processed, slots, slot_params, stops, bias_ids, bias_values, vocab,
    STOPS: tl.constexpr, BIASES: tl.constexpr, STOP_BLOCK: tl.constexpr, BIAS_BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: one row's bias, then its end tokens' mask."""
    row = tl.program_id(0)
    if tl.load(processed + row) == 0:
        return
    slot = tl.load(slots + row)
    values = work + row.to(tl.int64) * vocab
    index = tl.arange(0, BIAS_BLOCK)
    biased = index < word(slot_params, slot, NUM_BIAS)
    at = values + tl.load(bias_ids + slot * BIASES + index, mask=biased, other=0)
    bias = tl.load(bias_values + slot * BIASES + index, mask=biased, other=0.0)
    tl.store(at, tl.load(at, mask=biased, other=0.0) + bias, mask=biased)
    tl.debug_barrier()  # A biased token may be an end token: -inf must be the last word.
    index = tl.arange(0, STOP_BLOCK)
    stopped = (index < word(slot_params, slot, NUM_STOP)) & (
        word(slot_params, slot, OUTPUT_INDEX) < word(slot_params, slot, MIN_TOKENS)
    )
    at = values + tl.load(stops + slot * STOPS + index, mask=stopped, other=0)
    tl.store(at, float("-inf"), mask=stopped)


@triton.jit(do_not_specialize=["dummy_slot"])
def top_chunk_kernel(
    logits, stride, slots, slot_params, part_max, part_sum, part_top, dummy_slot, vocab, CHUNK: tl.constexpr, TOP: tl.constexpr
):  # fmt: skip
    """One program: CHUNK raw logits of a row that asks for log-probabilities: maximum, sum of exponentials, the best."""
    row = tl.program_id(1)
    slot = tl.load(slots + row)
    count = word(slot_params, slot, LOGPROBS)
    if (count < 0) | (slot == dummy_slot):
        return
    ids = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    inside = ids < vocab
    values = tl.load(logits + row.to(tl.int64) * stride + ids, mask=inside, other=float("-inf")).to(tl.float32)
    most = tl.max(values, axis=0)
    part = row * tl.num_programs(0) + tl.program_id(0)
    tl.store(part_max + part, most)
    tl.store(part_sum + part, tl.sum(tl.exp(values - tl.where(most == float("-inf"), 0.0, most)), axis=0))
    # One integer orders by value, then by token id, the first of equals first.
    left = tl.where(inside, (ordered(values).to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64), LOWEST)
    place = 0
    while place < count:
        best = tl.max(left, axis=0)
        tl.store(part_top + part * TOP + place, best)
        left = tl.where(left == best, LOWEST, left)
        place += 1


@triton.jit(do_not_specialize=["dummy_slot"])
def top_row_kernel(
    logits, stride, slots, slot_params, part_max, part_sum, part_top, tokens, details, dummy_slot, chunks,
    CHUNKS: tl.constexpr, TOP: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    """One program: one row's details: [chosen token's log-probability, TOP ids, TOP log-probabilities]."""
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    count = word(slot_params, slot, LOGPROBS)
    if (count < 0) | (slot == dummy_slot):
        return
    chunk = tl.arange(0, CHUNKS)
    most = tl.load(part_max + row * chunks + chunk, mask=chunk < chunks, other=float("-inf"))
    sums = tl.load(part_sum + row * chunks + chunk, mask=chunk < chunks, other=0.0)
    best = tl.max(most, axis=0)
    shift = best + tl.log(tl.sum(sums * tl.exp(most - best), axis=0))
    chosen = tl.load(logits + row.to(tl.int64) * stride + tl.load(tokens + row)).to(tl.float32)
    detail = details + row * (1 + 2 * TOP)
    tl.store(detail, (chosen - shift).to(tl.int32, bitcast=True))
    index = tl.arange(0, CANDIDATES)
    known = (index < chunks * TOP) & (index % TOP < count)
    left = tl.load(part_top + row * chunks * TOP + index, mask=known, other=LOWEST)
    place = 0
    while place < count:
        top = tl.max(left, axis=0)
        left = tl.where(left == top, LOWEST, left)
        tl.store(detail + 1 + place, 0x7FFFFFFF - (top & 0xFFFFFFFF).to(tl.int32))
        value = from_ordered((top >> 32).to(tl.int32)) - shift
        tl.store(detail + 1 + TOP + place, value.to(tl.int32, bitcast=True))
        place += 1
