"""A decode step's state on the device: what the captured graph reads at its start and moves on at its end."""

import triton
import triton.language as tl

from common.engine.cuda.jit.elementwise import begin


@triton.jit
def gather_step_kernel(
    slots, token, device_len, page_table, input_ids, positions, seq_lens, out_loc, block_tables,
    table_stride, block_tables_stride, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK entries of one request's block table; the first one of a request also its scalars."""
    begin(PDL)
    entry = tl.program_id(0)
    slot = tl.load(slots + entry)
    length = tl.load(device_len + slot)
    locations = page_table + slot.to(tl.int64) * table_stride
    if tl.program_id(1) == 0:
        tl.store(input_ids + entry, tl.load(token + slot).to(input_ids.dtype.element_ty))
        tl.store(positions + entry, (length - 1).to(positions.dtype.element_ty))
        tl.store(seq_lens + entry, length.to(seq_lens.dtype.element_ty))
        tl.store(out_loc + entry, tl.load(locations + length - 1).to(out_loc.dtype.element_ty))
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = index * PAGE_SIZE < length
    first = tl.load(locations + index * PAGE_SIZE, mask=mask, other=0)
    tl.store(block_tables + entry.to(tl.int64) * block_tables_stride + index, first // PAGE_SIZE, mask=mask)


@triton.jit(do_not_specialize=["entries", "dummy_slot"])
def advance_kernel(slots, next_token, token, device_len, entries, dummy_slot, BLOCK: tl.constexpr, PDL: tl.constexpr):
    begin(PDL)
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + entry, mask=entry < entries, other=dummy_slot)
    live = slot != dummy_slot
    tl.store(token + slot, tl.load(next_token + entry, mask=live, other=0).to(token.dtype.element_ty), mask=live)
    tl.store(device_len + slot, tl.load(device_len + slot, mask=live, other=0) + 1, mask=live)


@triton.jit(do_not_specialize_on_alignment=["updates"])
def scatter_updates_kernel(updates, page_table, table_stride, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """One program: BLOCK pages of whatever rows. updates: [1 + 3 * capacity], count first, then triples (row, index, page)."""
    update = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = update < tl.load(updates)
    row = tl.load(updates + 1 + update * 3, mask=mask, other=0).to(tl.int64)
    index = tl.load(updates + 2 + update * 3, mask=mask, other=0)
    page = tl.load(updates + 3 + update * 3, mask=mask, other=0)
    offset = tl.arange(0, PAGE_SIZE)
    target = page_table + row * table_stride + index * PAGE_SIZE
    tl.store(target[:, None] + offset[None, :], (page * PAGE_SIZE)[:, None] + offset[None, :], mask=mask[:, None])
