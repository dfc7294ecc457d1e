"""What sampling knows of each slot, on the device: loading it, reading it, moving it on by a token.

A slot's slot_params are 32-bit words (sampling_state.HEADER); its history one word per token of the vocabulary: twice the token's
occurrences in the output, plus 1 if the prompt has it.
"""

import triton
import triton.language as tl

TEMPERATURE = tl.constexpr(0)
TOP_K = tl.constexpr(1)
TOP_P = tl.constexpr(2)
MIN_P = tl.constexpr(3)
SEED = tl.constexpr(4)  # two words, low first
COMPLETION = tl.constexpr(6)
OUTPUT_INDEX = tl.constexpr(7)
MIN_TOKENS = tl.constexpr(8)
LOGPROBS = tl.constexpr(9)
REPETITION = tl.constexpr(10)
FREQUENCY = tl.constexpr(11)
PRESENCE = tl.constexpr(12)
NUM_BIAS = tl.constexpr(13)
NUM_STOP = tl.constexpr(14)
FLAGS = tl.constexpr(15)
PARAMS = tl.constexpr(16)
"""Words of a slot. An upload's header has these more:"""
SLOT = tl.constexpr(16)
TAIL = tl.constexpr(17)
NUM_PROMPT = tl.constexpr(18)
NUM_OUTPUT = tl.constexpr(19)
HEADER = tl.constexpr(20)

DETERMINISTIC = tl.constexpr(1)
FILTERED = tl.constexpr(2)
PENALIZED = tl.constexpr(4)
"""Bits of FLAGS."""


@triton.jit
def word(slot_params, slot, INDEX: tl.constexpr):
    return tl.load(slot_params + slot * PARAMS + INDEX)


@triton.jit
def real(slot_params, slot, INDEX: tl.constexpr):
    return tl.load(slot_params + slot * PARAMS + INDEX).to(tl.float32, bitcast=True)


@triton.jit
def load_slots_kernel(
    upload, slot_params, stops, bias_ids, bias_values, mask, mask_stride,
    STOPS: tl.constexpr, BIASES: tl.constexpr, STOP_BLOCK: tl.constexpr, BIAS_BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: one upload. Its tail: stop ids, bias ids, bias values (then history, see count_history_kernel)."""
    header = upload + tl.program_id(0) * HEADER
    slot = tl.load(header + SLOT)
    index = tl.arange(0, PARAMS)
    tl.store(slot_params + slot * PARAMS + index, tl.load(header + index))
    tl.store(mask + slot * mask_stride + mask_stride - 1, 0)
    tail = upload + tl.load(header + TAIL)
    num_stop, num_bias = tl.load(header + NUM_STOP), tl.load(header + NUM_BIAS)
    index = tl.arange(0, STOP_BLOCK)
    tl.store(stops + slot * STOPS + index, tl.load(tail + index, mask=index < num_stop, other=0), mask=index < num_stop)
    index = tl.arange(0, BIAS_BLOCK)
    biased = index < num_bias
    tail += num_stop
    tl.store(bias_ids + slot * BIASES + index, tl.load(tail + index, mask=biased, other=0), mask=biased)
    values = tl.load(tail + num_bias + index, mask=biased, other=0).to(tl.float32, bitcast=True)
    tl.store(bias_values + slot * BIASES + index, values, mask=biased)


@triton.jit
def clear_history_kernel(upload, history, vocab, BLOCK: tl.constexpr):
    """One program: BLOCK tokens of an upload's slot, if it will use them."""
    header = upload + tl.program_id(1) * HEADER
    if tl.load(header + FLAGS) & PENALIZED == 0:
        return
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(history + tl.load(header + SLOT).to(tl.int64) * vocab + index, 0, mask=index < vocab)


@triton.jit
def count_history_kernel(upload, history, vocab, BLOCK: tl.constexpr):
    """One program: BLOCK ids of an upload's prompt and output, which follow one another in its tail."""
    header = upload + tl.program_id(1) * HEADER
    if tl.load(header + FLAGS) & PENALIZED == 0:
        return
    num_prompt = tl.load(header + NUM_PROMPT)
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < num_prompt + tl.load(header + NUM_OUTPUT)
    first = tl.load(header + TAIL) + tl.load(header + NUM_STOP) + 2 * tl.load(header + NUM_BIAS)
    ids = tl.load(upload + first + index, mask=inside, other=0)
    counts = history + tl.load(header + SLOT).to(tl.int64) * vocab + ids
    tl.atomic_or(counts, 1, mask=inside & (index < num_prompt), sem="relaxed")
    tl.atomic_add(counts, 2, mask=inside & (index >= num_prompt), sem="relaxed")


@triton.jit(do_not_specialize=["rows", "dummy_slot"])
def advance_kernel(slots, tokens, slot_params, history, rows, dummy_slot, vocab, BLOCK: tl.constexpr):
    """One program: BLOCK rows. Live slots differ, so nothing here is atomic."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + row, mask=row < rows, other=dummy_slot)
    live = slot != dummy_slot
    index = slot_params + slot * PARAMS + OUTPUT_INDEX
    tl.store(index, tl.load(index, mask=live, other=0) + 1, mask=live)
    counted = live & (tl.load(slot_params + slot * PARAMS + FLAGS, mask=live, other=0) & PENALIZED != 0)
    count = history + slot.to(tl.int64) * vocab + tl.load(tokens + row, mask=counted, other=0)
    tl.store(count, tl.load(count, mask=counted, other=0) + 2, mask=counted)
