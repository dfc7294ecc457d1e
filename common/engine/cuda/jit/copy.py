"""Whole pages from this GPU's pool to a raw address, which may be another GPU's memory."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["pieces"])
def copy_pages_kernel(src, src_pages, dst_base, dst_pages, pieces, PAGE_WORDS: tl.constexpr, BLOCK: tl.constexpr):
    """src: int64 words; a piece is BLOCK words of one page. Programs take pieces in turn, so that any number of them does."""
    PIECES_PER_PAGE: tl.constexpr = (PAGE_WORDS + BLOCK - 1) // BLOCK
    target = tl.multiple_of(dst_base.to(tl.pointer_type(tl.int64)), 16)
    piece = tl.program_id(0)
    while piece < pieces:
        pair = piece // PIECES_PER_PAGE
        word = piece % PIECES_PER_PAGE * BLOCK + tl.arange(0, BLOCK)
        mask = word < PAGE_WORDS
        source = src + tl.load(src_pages + pair).to(tl.int64) * PAGE_WORDS
        values = tl.load(source + word, mask=mask, other=0)
        tl.store(target + tl.load(dst_pages + pair).to(tl.int64) * PAGE_WORDS + word, values, mask=mask)
        piece += tl.num_programs(0)
