"""The small kernels against torch in float64. What they must not write is NaN (or -7) before, and still is after."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from common.engine.cuda import kernels
from common.engine.layers import Unnormed

PAGE_SIZE = 16
LAYERS = 3
POISON = -7


def poisoned(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.full(shape, float("nan") if dtype.is_floating_point else POISON, dtype=dtype, device=device)


def rows_of_a_wider_tensor(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.randn(rows, width + 16, dtype=dtype, device=device)[:, :width]


def assert_near(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """To a last bit or so of got's dtype. wanted: float64."""
    assert torch.isfinite(got).all()
    step = torch.finfo(got.dtype).eps
    torch.testing.assert_close(got.double(), wanted, rtol=step, atol=step * 0.02)


def normed(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """x / rms(x) * weight in float64."""
    return x.double() if weight is None else torch.nn.functional.rms_norm(x.double(), (x.shape[-1],), weight.double(), eps)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("tokens", "width"), [(1, 64), (5, 576), (3, 1024), (2, 5120), (1, 8192)])
def test_rms_norm_is_the_reference_s(device: torch.device, dtype: torch.dtype, tokens: int, width: int) -> None:
    x = rows_of_a_wider_tensor(tokens, width, dtype, device)
    weight = torch.randn(width, dtype=dtype, device=device)
    out = poisoned(tokens + 1, width, dtype=dtype, device=device)
    kernels.rms_norm(x, weight, eps=1e-5, out=out[:tokens])
    assert_near(out[:tokens], normed(x, weight, 1e-5))
    assert out[tokens].isnan().all()


def test_rms_norm_may_overwrite_its_input(device: torch.device) -> None:
    x, weight = torch.randn(3, 96, device=device).bfloat16(), torch.randn(96, device=device).bfloat16()
    wanted = normed(x, weight, 1e-6)
    assert kernels.rms_norm(x, weight, eps=1e-6, out=x) is x
    assert_near(x, wanted)


def test_rms_norm_of_large_values_does_not_overflow(device: torch.device) -> None:
    x, weight = torch.full((1, 64), 60000.0, dtype=torch.float16, device=device), torch.ones(64, device=device).half()
    assert_near(kernels.rms_norm(x, weight, eps=1e-5, out=torch.empty_like(x)), torch.ones(1, 64, device=device).double())


@pytest.mark.parametrize(("tokens", "inner"), [(1, 96), (3, 1536), (2, 3072), (4, 1000)])
def test_silu_and_mul_is_the_reference_s(device: torch.device, tokens: int, inner: int) -> None:
    gate_up = rows_of_a_wider_tensor(tokens, 2 * inner, torch.bfloat16, device) * 4
    out = poisoned(tokens + 1, inner, dtype=torch.bfloat16, device=device)
    kernels.silu_and_mul(gate_up, out[:tokens])
    gate, up = gate_up.double().chunk(2, dim=-1)
    assert_near(out[:tokens], torch.nn.functional.silu(gate) * up)
    assert out[tokens].isnan().all()


def test_rms_norm_without_a_weight_has_one_of_ones(device: torch.device) -> None:
    x = rows_of_a_wider_tensor(3, 576, torch.bfloat16, device)
    ones = torch.ones(576, dtype=x.dtype, device=device)
    assert_near(kernels.rms_norm(x, None, eps=1e-5, out=torch.empty_like(x)), normed(x, ones, 1e-5))


@pytest.mark.parametrize(("tokens", "width", "inner"), [(1, 64, 96), (3, 1000, 1536), (2, 1024, 3072)])
def test_silu_and_mul_may_divide_by_the_root_of_what_was_not_normed(
    device: torch.device, tokens: int, width: int, inner: int
) -> None:
    source = rows_of_a_wider_tensor(tokens, width, torch.bfloat16, device) * 30
    gate_up = rows_of_a_wider_tensor(tokens, 2 * inner, torch.bfloat16, device) * 100
    out = poisoned(tokens + 1, inner, dtype=torch.bfloat16, device=device)
    kernels.silu_and_mul(gate_up, out[:tokens], unnormed=Unnormed(source, 1e-5))
    gate, up = (gate_up.double() / (source.double().square().mean(1, keepdim=True) + 1e-5).sqrt()).chunk(2, dim=-1)
    assert_near(out[:tokens], torch.nn.functional.silu(gate) * up)
    assert out[tokens].isnan().all()


class Attention:
    """Inputs of qk_norm_rope_store for one layer, with pools full of NaN."""

    eps = 1e-6
    layer = 1

    def __init__(self, device: torch.device, dtype: torch.dtype, tokens: int, heads: int, kv_heads: int, dim: int, norm: bool):
        self.heads, self.kv_heads, self.dim, self.tokens = heads, kv_heads, dim, tokens
        self.qkv = rows_of_a_wider_tensor(tokens, (heads + 2 * kv_heads) * dim, dtype, device)
        self.q_out = poisoned(tokens + 1, heads, dim, dtype=dtype, device=device)
        self.positions = torch.randint(0, 500, (tokens,), device=device)
        angles = torch.rand(500, dim // 2, dtype=torch.float64, device=device) * 6.3
        self.cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1).float()
        self.weights = [torch.randn(dim, dtype=dtype, device=device) if norm else None for _ in range(2)]
        pages = tokens // PAGE_SIZE + 2
        self.pool, self.peer = (
            poisoned(pages, LAYERS, 2, PAGE_SIZE, kv_heads, dim, dtype=dtype, device=device) for _ in range(2)
        )
        self.out_loc, self.peer_loc = (torch.randperm(pages * PAGE_SIZE, device=device)[:tokens] for _ in range(2))
        self.out_loc[torch.rand(tokens, device=device) < 0.2] = -1
        self.peer_loc[torch.rand(tokens, device=device) < 0.3] = -1

    def run(self, *, to_peer: bool, **options: Any) -> None:
        kernels.qk_norm_rope_store(
            self.qkv,
            self.q_out[: self.tokens],
            positions=self.positions,
            cos_sin=self.cos_sin,
            q_weight=self.weights[0],
            k_weight=self.weights[1],
            eps=self.eps,
            pool=self.pool,
            layer=self.layer,
            out_loc=self.out_loc,
            peer_addr=self.peer_addresses() if to_peer else None,
            **options,
        )

    def peer_addresses(self) -> torch.Tensor:
        row_bytes = self.kv_heads * self.dim * 2
        page, offset = self.peer_loc // PAGE_SIZE, self.peer_loc % PAGE_SIZE
        address = self.peer.data_ptr() + (page * LAYERS * 2 * PAGE_SIZE + offset) * row_bytes
        return torch.where(self.peer_loc >= 0, address, 0)

    def rotated(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        x = normed(x, weight, self.eps)
        cos, sin = self.cos_sin[self.positions][:, None].double().chunk(2, dim=-1)
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    def check(self, *, to_peer: bool) -> None:
        heads = self.qkv.reshape(self.tokens, -1, self.dim)
        q, k, v = torch.split(heads, [self.heads, self.kv_heads, self.kv_heads], dim=1)
        assert_near(self.q_out[: self.tokens], self.rotated(q, self.weights[0]))
        assert self.q_out[self.tokens].isnan().all()
        k = self.rotated(k, self.weights[1])
        self.check_pool(self.pool, self.out_loc, k, v)
        self.check_pool(self.peer, self.peer_loc if to_peer else torch.full_like(self.peer_loc, -1), k, v)

    def check_pool(self, pool: torch.Tensor, loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """The stored rows are there, and nothing else was touched."""
        stored = loc >= 0
        page, offset = loc[stored] // PAGE_SIZE, loc[stored] % PAGE_SIZE
        assert_near(pool[page, self.layer, 0, offset], k[stored])
        stored_v = pool[page, self.layer, 1, offset]
        if v.dtype == stored_v.dtype:
            assert torch.equal(stored_v, v[stored])
        else:
            assert_near(stored_v, v[stored])
        rest = pool.clone()
        rest[page, self.layer, :, offset] = float("nan")
        assert rest.isnan().all()


@pytest.mark.parametrize("to_peer", [False, True], ids=["own pool", "both pools"])
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "dim", "norm", "dtype"),
    [
        (1, 16, 8, 128, True, torch.bfloat16),
        (7, 9, 3, 64, False, torch.bfloat16),
        (5, 32, 8, 128, False, torch.float16),
        (3, 4, 1, 32, True, torch.float16),
    ],
)
def test_heads_are_normed_rotated_and_stored(
    device: torch.device, to_peer: bool, tokens: int, heads: int, kv_heads: int, dim: int, norm: bool, dtype: torch.dtype
) -> None:
    attention = Attention(device, dtype, tokens, heads, kv_heads, dim, norm)
    attention.run(to_peer=to_peer)
    attention.check(to_peer=to_peer)


@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "dim", "norm", "width"), [(1, 16, 8, 128, True, 1024), (7, 9, 3, 64, False, 576)]
)
def test_heads_may_be_divided_by_the_root_of_what_was_not_normed(
    device: torch.device, tokens: int, heads: int, kv_heads: int, dim: int, norm: bool, width: int
) -> None:
    attention = Attention(device, torch.bfloat16, tokens, heads, kv_heads, dim, norm)
    x = rows_of_a_wider_tensor(tokens, width, torch.bfloat16, device) * 30
    attention.run(to_peer=True, unnormed=Unnormed(x, 1e-5))
    attention.qkv = attention.qkv.double() / (x.double().square().mean(1, keepdim=True) + 1e-5).sqrt()
    attention.check(to_peer=True)


@pytest.mark.parametrize("tokens", [8, 13])
def test_several_tokens_a_program_store_the_same(device: torch.device, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "MANY_TOKENS", 1)
    attention = Attention(device, torch.bfloat16, tokens, heads=6, kv_heads=2, dim=64, norm=True)
    attention.positions = attention.positions.int()
    attention.out_loc = attention.out_loc.int()
    attention.run(to_peer=True)
    attention.check(to_peer=True)


def test_rows_may_lie_past_2_to_the_31_elements_of_the_pool(device: torch.device) -> None:
    if device.type == "cpu":
        pytest.skip("needs 5 GiB of memory")
    attention = Attention(device, torch.bfloat16, 4, heads=2, kv_heads=2, dim=64, norm=False)
    pages = (1 << 31) // attention.pool[0].numel() + 2
    attention.pool = torch.empty(pages, *attention.pool.shape[1:], dtype=torch.bfloat16, device=device)
    attention.out_loc = torch.arange(4, device=device) + (pages - 1) * PAGE_SIZE
    attention.run(to_peer=False)
    v = attention.qkv.reshape(4, -1, 64)[:, 4:]
    assert torch.equal(attention.pool[-1, attention.layer, 1, :4], v)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("page_bytes", [48, 4096, 40000])
def test_pages_are_copied_to_an_address(
    device: torch.device, page_bytes: int, index_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "COPY_BYTES", 1024)
    src = torch.randint(0, 100, (6, page_bytes // 4), dtype=torch.int32, device=device)
    dst = poisoned(9, page_bytes // 4, dtype=torch.int32, device=device)
    src_pages, dst_pages = torch.tensor([5, 0, 3], device=device), torch.tensor([1, 8, 2], device=device)
    kernels.copy_pages(
        src,
        src_pages.to(index_dtype),
        dst.data_ptr(),
        dst_pages.to(index_dtype),
        max_programs=1 << 30 if page_bytes < 9999 else 7,
    )
    assert torch.equal(dst[dst_pages], src[src_pages])
    dst[dst_pages] = POISON
    assert (dst == POISON).all()


def test_copying_no_pages_does_nothing(device: torch.device) -> None:
    none = torch.empty(0, dtype=torch.int64, device=device)
    kernels.copy_pages(torch.zeros(2, 8, dtype=torch.int64, device=device), none, 16, none)
