"""Layers against plain float64 arithmetic; the packed products against the plain ones."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import common.engine.cpu_linear as cpu_linear
from common.engine.chunk_attention import BLOCK_TOKENS, attend_chunk, block_mask
from common.engine.cpu_linear import PackedLinear, PlainLinear, WidenedLinear, can_pack, is_widened, make_linear, product
from common.engine.layers import RMSNorm
from common.engine.rotary import RotaryEmbedding

CPU = torch.device("cpu")


@pytest.mark.parametrize("tokens", [1, 3, 8, 65])
@pytest.mark.parametrize("bias", [True, False])
def test_packed_and_plain_linears_agree(tokens: int, bias: bool) -> None:
    torch.manual_seed(0)
    weight, x, residual = torch.randn(48, 32), torch.randn(tokens, 32), torch.randn(tokens, 48)
    offset = torch.randn(48) if bias else None
    expected = (x.double() @ weight.double().T + (0 if offset is None else offset.double())).float()
    for linear in (PlainLinear(weight, offset), PackedLinear(weight, offset)):
        torch.testing.assert_close(linear.forward(x), expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(linear.forward_add(x, residual.clone()), expected + residual, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [0, 1, 2, 65])
@pytest.mark.parametrize("bias", [True, False])
def test_widened_linears_are_float32_products_rounded_once(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, tokens: int, bias: bool
) -> None:
    monkeypatch.setattr(cpu_linear, "BLOCK_ELEMENTS", 32 * 20)  # 48 rows: two whole blocks and a part of one.
    torch.manual_seed(0)
    weight, x, residual = (torch.randn(*shape).to(dtype) for shape in ((48, 32), (tokens, 32), (tokens, 48)))
    offset = torch.randn(48).to(dtype) if bias else None
    before = weight.clone()
    linear = WidenedLinear(weight, offset)
    exact = x.double() @ weight.double().T + (0 if offset is None else offset.double())
    relative, absolute = (torch.finfo(dtype).eps, 1e-4) if tokens > 1 else (2e-2, 2e-2)
    for _ in range(2):
        torch.testing.assert_close(linear.forward(x).double(), exact, rtol=relative, atol=absolute)
    added = linear.forward_add(x, residual.clone())
    assert added.dtype == dtype and torch.equal(added, linear.forward(x) + residual)
    assert torch.equal(weight, before)


def test_threads_do_not_widen_into_the_same_memory() -> None:
    torch.manual_seed(0)
    linears = [WidenedLinear(torch.randn(256, 64).bfloat16()) for _ in range(4)]
    x = torch.randn(16, 64).bfloat16()
    expected = [linear.forward(x) for linear in linears]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(50):
            for got, one in zip(pool.map(lambda linear: linear.forward(x), linears), expected, strict=True):
                assert torch.equal(got, one)


def test_each_dtype_and_machine_has_its_linears(monkeypatch: pytest.MonkeyPatch) -> None:
    assert can_pack(torch.float32, CPU), "every build of torch for this project's CPUs has oneDNN"
    weight = torch.randn(4, 4)
    for leads, prompts in ((True, PlainLinear), (False, PackedLinear)):
        monkeypatch.setattr(cpu_linear, "blas_leads", lambda leads=leads: leads)
        assert isinstance(make_linear(weight), PackedLinear)
        assert isinstance(make_linear(weight, many_rows=True), prompts)
    for dtype, device in ((torch.float64, CPU), (torch.float32, torch.device("meta"))):
        assert not can_pack(dtype, device)
    assert isinstance(make_linear(weight.double()), PlainLinear)
    monkeypatch.setattr(cpu_linear, "can_pack", lambda dtype, device: False)
    for widened, linear in ((True, WidenedLinear), (False, PlainLinear)):
        monkeypatch.setattr(cpu_linear, "is_widened", lambda dtype, device, widened=widened: widened)
        for many_rows in (False, True):
            assert isinstance(make_linear(weight.bfloat16(), many_rows=many_rows), linear)


@pytest.mark.parametrize("has", [False, True])
def test_16_bits_are_widened_where_the_processor_does_not_compute_in_them(monkeypatch: pytest.MonkeyPatch, has: bool) -> None:
    is_widened.cache_clear()
    for name in ("_is_mkldnn_bf16_supported", "_is_mkldnn_fp16_supported"):
        monkeypatch.setattr(torch.ops.mkldnn, name, lambda: has)
    widened = {dtype for dtype in (torch.float32, torch.bfloat16, torch.float16) if is_widened(dtype, CPU)}
    assert widened == (set() if has else {torch.bfloat16, torch.float16})
    assert not is_widened(torch.bfloat16, torch.device("meta"))
    is_widened.cache_clear()


@pytest.mark.parametrize("leads", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_product_takes_strided_operands(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, leads: bool) -> None:
    monkeypatch.setattr(cpu_linear, "blas_leads", lambda: leads)
    a, b = torch.randn(10, 7, 6).to(dtype)[:, 2], torch.randn(6, 9).to(dtype).T
    assert product(a, b).dtype == dtype
    torch.testing.assert_close(product(a, b), a @ b.T)


def test_rms_norm_is_the_formula() -> None:
    x, weight = torch.randn(5, 32), torch.rand(32)
    expected = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    torch.testing.assert_close(RMSNorm(weight, 1e-5).forward(x).double(), expected, rtol=1e-5, atol=1e-6)


def test_rotary_keeps_lengths_and_depends_on_distance_only() -> None:
    rotary = RotaryEmbedding(16, theta=10000.0, scaling=None, max_context=512, dtype=torch.float32, device="cpu")
    q, k = torch.randn(1, 1, 16).expand(3, 1, 16), torch.randn(1, 1, 16).expand(3, 1, 16)
    rotated_q = rotary.rows(torch.tensor([7, 107, 507])).rotate(q)
    rotated_k = rotary.rows(torch.tensor([3, 103, 503])).rotate(k)
    torch.testing.assert_close(rotated_q.norm(dim=-1), q.norm(dim=-1))
    scores = (rotated_q * rotated_k).sum(-1).flatten()
    torch.testing.assert_close(scores, scores[:1].expand(3), rtol=1e-4, atol=1e-4)
    assert torch.equal(rotary.rows(torch.tensor([0])).rotate(q[:1]), q[:1])


def test_rotations_may_be_wider_than_what_they_rotate() -> None:
    wide, narrow = (
        RotaryEmbedding(16, theta=10000.0, scaling=None, max_context=4096, dtype=dtype, device="cpu").rows(
            torch.arange(4000, 4096)
        )
        for dtype in (torch.float32, torch.bfloat16)
    )
    x = torch.randn(96, 2, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = wide.rotate(x.float())
    assert wide.rotate(x).dtype == torch.bfloat16
    assert torch.equal(wide.rotate(x), expected.bfloat16()), "rounded once, at the end"
    assert (narrow.rotate(x).float() - expected).abs().mean() > (wide.rotate(x).float() - expected).abs().mean()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("tokens", "length"),
    [(1, 1), (2, 9), (BLOCK_TOKENS, BLOCK_TOKENS), (BLOCK_TOKENS + 1, BLOCK_TOKENS + 1), (BLOCK_TOKENS + 1, 400), (300, 301)],
)
def test_a_chunk_of_several_blocks_attends_causally(tokens: int, length: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(tokens, 6, 16).to(dtype), torch.randn(length, 2, 16).to(dtype), torch.randn(length, 2, 16).to(dtype)
    keys, values = (x.double().repeat_interleave(3, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), keys) / 4
    beyond = torch.arange(length) > torch.arange(length - tokens, length)[:, None]
    expected = torch.einsum("hqk,khd->qhd", scores.masked_fill(beyond, float("-inf")).softmax(-1), values).flatten(1)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(
        attend_chunk(q, k, v, block_mask(tokens, 3, CPU)).double(), expected, rtol=tolerance, atol=tolerance
    )
