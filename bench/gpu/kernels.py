"""The GPU's kernels one by one, in CUDA graphs: the small ones beside torch's, candidate plans of small_linear, and whole layers.

python -m bench.gpu.kernels [--only small linear layers] [--tokens 1 8] [--shapes 8B,head] [--top 4] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F

from bench.gpu import layer, linear
from bench.gpu.clock import copies_beyond_l2, graph_us
from common.engine.cuda import kernels

PARTS = ["small", "linear", "layers"]
PAGE_SIZE = 64
EPS = 1e-6
Row = tuple[str, int, float, float | None]
"""What, bytes read and written, microseconds, torch's."""


def bf16(*size: int) -> torch.Tensor:
    return torch.randn(size, dtype=torch.bfloat16, device="cuda")


def over(sets: Sequence[tuple[torch.Tensor, ...]], call: Callable[..., object]) -> float:
    """Microseconds of call(*tensors), which differ from launch to launch."""
    return graph_us([lambda tensors=tensors: call(*tensors) for tensors in sets])  # type: ignore[misc]


def norms() -> Iterator[Row]:
    for tokens, width in ((1, 1024), (1, 4096), (64, 4096), (256, 1024), (8192, 1024), (8192, 4096)):
        sets = [(bf16(tokens, width), bf16(width), bf16(tokens, width)) for _ in range(copies_beyond_l2(tokens * width * 4))]
        ours = over(sets, lambda x, w, out: kernels.rms_norm(x, w, eps=EPS, out=out))
        theirs = over(sets, lambda x, w, out: F.rms_norm(x, x.shape[1:], w, EPS))
        yield f"rms_norm {tokens} x {width}", tokens * width * 4, ours, theirs


def silus() -> Iterator[Row]:
    for tokens, inner in ((1, 3072), (1, 14336), (256, 3072), (2048, 14336), (8192, 14336)):
        sets = [(bf16(tokens, 2 * inner), bf16(tokens, inner)) for _ in range(copies_beyond_l2(tokens * inner * 6))]
        ours = over(sets, kernels.silu_and_mul)
        theirs = over(
            sets, lambda gate_up, out: torch.mul(F.silu(gate_up[:, : out.shape[1]]), gate_up[:, out.shape[1] :], out=out)
        )
        yield f"silu_and_mul {tokens} x {inner}", tokens * inner * 6, ours, theirs


def ropes() -> Iterator[Row]:
    for heads, norm in ((16, True), (32, False)):
        for tokens in (1, 64, 256, 1024, 8192):
            for peer in (False, True) if tokens >= 1024 else (False,):
                yield rope(tokens, heads, norm, peer)


def rope(tokens: int, heads: int, norm: bool, peer: bool) -> Row:
    """kv heads 8 of 128. The peer's pool is another one on this GPU."""
    pages = max(tokens // PAGE_SIZE, 1) * 4
    pools = [torch.zeros(pages, 2, 2, PAGE_SIZE, 8, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    cos_sin, weight = torch.rand(tokens, 128, device="cuda"), bf16(128) if norm else None
    positions = torch.arange(tokens, device="cuda")
    first = pools[1].data_ptr()
    address = first + positions // PAGE_SIZE * pools[1][0].nbytes + positions % PAGE_SIZE * 2048 if peer else None
    row_bytes = (heads + 16) * 128 * 2
    sets = [(bf16(tokens, row_bytes // 2), bf16(tokens, heads, 128)) for _ in range(copies_beyond_l2(2 * tokens * row_bytes))]
    us = over(
        sets,
        lambda qkv, q: kernels.qk_norm_rope_store(
            qkv, q, positions=positions, cos_sin=cos_sin, q_weight=weight, k_weight=weight, eps=EPS, pool=pools[0], layer=1,
            out_loc=positions, peer_addr=address,
        ),
    )  # fmt: skip
    name = f"rope_store {tokens} x {heads}+8+8 heads{' norm' * norm}{' +peer' * peer}"
    return name, tokens * (2 * row_bytes + 4096 * peer), us, None


def steps() -> Iterator[Row]:
    for batch, context in ((1, 131072), (256, 8192)):
        yield from step(batch, context)


def step(batch: int, context: int) -> list[Row]:
    def ints(*size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int32, device="cuda")

    pages, table, token, grown = context // PAGE_SIZE, ints(batch + 1, context), ints(batch + 1), ints(batch + 1)
    length, slots = ints(batch + 1).fill_(context), torch.arange(batch, dtype=torch.int32, device="cuda")
    blocks, ids, positions, lens, locs = ints(batch, pages), ints(batch), ints(batch), ints(batch), ints(batch)

    def gather() -> None:
        kernels.gather_step(
            slots, token=token, device_len=length, page_table=table, input_ids=ids, positions=positions, seq_lens=lens,
            out_loc=locs, block_tables=blocks, page_size=PAGE_SIZE,
        )  # fmt: skip

    def advance() -> None:
        kernels.advance(slots, ids, token=token, device_len=grown, dummy_slot=batch)

    return [
        (f"gather_step {batch} of {context}", batch * pages * 36, graph_us([gather] * 16), None),
        (f"advance {batch}", batch * 20, graph_us([advance] * 16), None),
    ]


def copies() -> Iterator[Row]:
    """Within this GPU; a peer's pool is bound by NVLink instead (about 390 GB/s one way)."""
    for pages, page_bytes in ((1, 8 << 20), (64, 8 << 20), (1, 32 << 10), (8192, 32 << 10)):
        src, dst = (torch.zeros(pages * 2, page_bytes // 8, dtype=torch.int64, device="cuda") for _ in range(2))
        order, some = torch.randperm(pages * 2, device="cuda")[:pages], src[:pages]
        ours = over([(src, order, dst)] * 8, lambda src, order, dst: kernels.copy_pages(src, order, dst.data_ptr(), order))
        theirs = over([(some, order, dst)] * 8, lambda some, order, dst: dst.index_copy_(0, order, some))
        yield f"copy_pages {pages} x {page_bytes >> 10} KiB", 2 * pages * page_bytes, ours, theirs


def small_kernels() -> None:
    print(f"{'kernel':44} {'us':>9} {'GB/s':>6} {'torch us':>9}")
    for rows in (norms(), silus(), ropes(), steps(), copies()):
        for name, moved_bytes, us, theirs in rows:
            print(f"{name:44} {us:9.2f} {moved_bytes / us * 1e-3:6.0f} {'' if theirs is None else f'{theirs:9.2f}'}", flush=True)
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8], help="batch sizes of products and layers")
    parser.add_argument("--shapes", default="", help="parts of products' names, by commas")
    parser.add_argument("--top", type=int, default=4, help="plans to print per product")
    parser.add_argument("--json", type=Path, help="where to write every plan's time")
    options = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    if "small" in options.only:
        small_kernels()
    if "linear" in options.only:
        results = linear.tune(options.tokens, only=options.shapes, top=options.top)
        if options.json:
            options.json.write_text(json.dumps(results))
    if "layers" in options.only:
        layer.compare(options.tokens)


if __name__ == "__main__":
    main()
