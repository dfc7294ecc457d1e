"""Which kernel decode steps attend with, by geometry; nothing is launched, so the tests need no GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("flashinfer", reason="flashinfer is not installed")

from common.engine.cuda.attention_choice import choose_decode
from common.engine.cuda.attention_kernels import Geometry, XqaDecode
from common.engine.cuda.flash_decoding import FlashDecoding
from common.errors import StartError


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device=None: (9, 0))


def geometry_of(page_size: int, head_dim: int) -> Geometry:
    return Geometry(
        num_heads=8,
        num_kv_heads=2,
        head_dim=head_dim,
        page_size=page_size,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )


@pytest.mark.parametrize(("page_size", "head_dim"), [(16, 64), (64, 128), (128, 256), (256, 128), (512, 64)])
def test_auto_is_our_own_kernel_where_it_serves(page_size: int, head_dim: int) -> None:
    assert isinstance(choose_decode("auto", geometry_of(page_size, head_dim), max_pages=1), FlashDecoding)
    assert isinstance(choose_decode("triton", geometry_of(page_size, head_dim), max_pages=1), FlashDecoding)


def test_xqa_is_there_for_who_asks() -> None:
    assert isinstance(choose_decode("xqa", geometry_of(64, 128), max_pages=1), XqaDecode)


@pytest.mark.parametrize(("page_size", "head_dim"), [(8, 128), (64, 32), (512, 128), (256, 256)])
def test_what_our_kernel_does_not_serve_is_left_to_others(monkeypatch: pytest.MonkeyPatch, page_size: int, head_dim: int) -> None:
    """512 tokens of 128 values would take 276 KB of shared memory, and an SM of an H200 has 227."""
    flashinfer_s = object()
    monkeypatch.setattr("common.engine.cuda.attention_choice.FlashInferDecode", lambda *_, **__: flashinfer_s)
    geometry = geometry_of(page_size, head_dim)
    assert choose_decode("auto", geometry, max_pages=1) is flashinfer_s
    refusal = f"--decode-attention triton does not serve pages of {page_size} tokens with head_dim {head_dim}"
    with pytest.raises(StartError, match=refusal):
        choose_decode("triton", geometry, max_pages=1)
