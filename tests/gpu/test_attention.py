"""The attention kernels of the GPU against the float32 reference, over a page-first pool whose pages are dealt out at random."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

pytest.importorskip("flashinfer", reason="flashinfer is not installed")

from common.engine.cuda.attention_choice import choose_decode, choose_prefill, prefill_workspace
from common.engine.cuda.attention_kernels import FlashInferDecode, FlashInferPrefill, Geometry
from common.engine.cuda.attention_reference import TorchDecode, TorchPrefill
from common.engine.cuda.flash_decoding import FlashDecoding, Plan, choose
from common.engine.cuda.spans import PagedSpans
from common.engine.kv_pool import KVPool
from common.worker_config import DecodeAttention

PAGE_SIZE = 64
POOL_PAGES = 200
LAYERS = 3
MAX_ERROR = 1e-2
HEADS = [(16, 8, 128), (32, 8, 128), (8, 2, 64), (9, 3, 64)]
PLANS = [
    replace(choose(5, 8, PAGE_SIZE), split=split, least_pages=least)
    for split, least in ((1, 1), (2, 1), (2, 12), (7, 1), (20, 1), (4, 16))
]


@pytest.fixture(autouse=True)
def _needs_gpu(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("these kernels run on a GPU only")


def geometry_of(heads: tuple[int, int, int], device: torch.device) -> Geometry:
    num_heads, num_kv_heads, head_dim = heads
    return Geometry(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=PAGE_SIZE,
        dtype=torch.bfloat16,
        device=device,
    )


def random_pool(geometry: Geometry) -> KVPool:
    pool = KVPool(
        POOL_PAGES,
        num_layers=LAYERS,
        page_size=PAGE_SIZE,
        num_kv_heads=geometry.num_kv_heads,
        head_dim=geometry.head_dim,
        dtype=geometry.dtype,
        device=geometry.device,
    )
    pool.tensor.normal_()
    return pool


def deal(lengths: list[int]) -> list[NDArray[np.int32]]:
    """Each request's pages, none twice."""
    counts = [-(-length // PAGE_SIZE) for length in lengths]
    shuffled = torch.randperm(POOL_PAGES).numpy().astype(np.int32)
    return np.split(shuffled[: sum(counts)], np.cumsum(counts)[:-1])


def assert_close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    assert torch.isfinite(got).all()
    error = (got.float() - wanted.float()).norm() / wanted.float().norm()
    assert error < MAX_ERROR, f"relative error {error:.2e}"


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("kind", ["triton", "xqa", "flashinfer"])
def test_decode_is_the_reference_s(device: torch.device, heads: tuple[int, int, int], kind: DecodeAttention) -> None:
    geometry = geometry_of(heads, device)
    if kind == "flashinfer" and geometry.head_dim != 128:
        pytest.skip("would compile for minutes")
    pool = random_pool(geometry)
    lengths = [1, 63, 64, 65, 128, 1000, 2048, 7]
    pages = deal(lengths)
    width = max(map(len, pages))
    tables = torch.zeros(len(lengths), width, dtype=torch.int32, device=device)
    for row, own in enumerate(pages):
        tables[row, : len(own)] = torch.from_numpy(own)
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    q = torch.randn(len(lengths), geometry.num_heads, geometry.head_dim, dtype=torch.bfloat16, device=device)
    kernel = choose_decode(kind, geometry, max_pages=POOL_PAGES)
    assert isinstance(kernel, FlashInferDecode) == (kind == "flashinfer")
    reference = TorchDecode()
    for layer in range(LAYERS):
        out, wanted = torch.full_like(q, float("nan")), torch.empty_like(q)
        for attend, result in ((kernel, out), (reference, wanted)):
            attend.plan(lengths, pages)
            attend.run(q, pool.k(layer), pool.v(layer), tables, seq_lens, result)
        assert_close(out, wanted)


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_a_sequence_in_parts_is_the_reference_s_every_time(device: torch.device, plan: Plan) -> None:
    geometry = geometry_of((32, 8, 128), device)
    pool, lengths = random_pool(geometry), [1, 64, 65, 700, 2048]
    kernel, reference = FlashDecoding(geometry), TorchDecode()
    q = torch.randn(len(lengths), geometry.num_heads, geometry.head_dim, dtype=torch.bfloat16, device=device)
    pages = deal(lengths)
    unwritten = next(page for page in range(POOL_PAGES) if not any(page in own for own in pages))
    pool.tensor[unwritten] = float("nan")  # What nobody has written yet may be anything.
    tables = torch.full((len(lengths), 40), unwritten, dtype=torch.int32, device=device)
    for row, own in enumerate(pages):
        tables[row, : len(own)] = torch.from_numpy(own)
        last = pool.tensor[int(own[-1])]
        last[:, :, (lengths[row] - 1) % PAGE_SIZE + 1 :] = float("nan")
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    wanted, out = torch.empty_like(q), torch.empty_like(q)
    reference.plan(lengths, pages)
    reference.run(q, pool.k(1), pool.v(1), tables, seq_lens, wanted)
    first = None
    for _ in range(20):
        kernel.run(q, pool.k(1), pool.v(1), tables, seq_lens, out.fill_(float("nan")), plan=plan)
        assert_close(out, wanted)
        first = out.clone() if first is None else first
        assert torch.equal(out, first)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("backend", ["auto", "fa2"])
def test_prefill_is_the_reference_s(device: torch.device, heads: tuple[int, int, int], backend: str) -> None:
    geometry = geometry_of(heads, device)
    pool = random_pool(geometry)
    query_len, kv_len = [1, 64, 100, 700, 1, 3], [1, 64, 163, 700, 2000, 66]
    pages = deal(kv_len)
    spans = PagedSpans(
        query_len=np.array(query_len, dtype=np.int32),
        kv_len=np.array(kv_len, dtype=np.int32),
        pages=np.concatenate(pages),
        page_indptr=np.cumsum([0, *map(len, pages)]).astype(np.int32),
    )
    tokens, padding = sum(query_len), 5
    q = torch.randn(tokens + padding, geometry.num_heads, geometry.head_dim, dtype=torch.bfloat16, device=device)
    kernel = choose_prefill("auto", geometry, prefill_workspace(device))
    if backend == "fa2":
        kernel = FlashInferPrefill(geometry, prefill_workspace(device), backend="fa2")
    reference = TorchPrefill()
    for layer in range(LAYERS):
        out, wanted = torch.full_like(q, float("nan")), torch.empty_like(q)
        for attend, result in ((kernel, out), (reference, wanted)):
            attend.plan(spans)
            attend.run(q, pool.k(layer), pool.v(layer), result)
        assert_close(out[:tokens], wanted[:tokens])
        assert out[tokens:].isnan().all()
