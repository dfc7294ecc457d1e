"""What building an engine can come to grief with is one line, and a GPU's pool gets what the rest of its worker leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from common.engine import start
from common.engine.config import EngineConfig
from common.engine.memory import CardMemory, pages_that_fit, size_pool
from common.engine.start import engine_config, starting_on
from common.errors import StartError
from prefill_worker.config import Config

GIB = 1 << 30
CARD = CardMemory(total=100 * GIB, free=80 * GIB, used=20 * GIB)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch with CUDA and two cards, as far as check_device looks."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


def config(**given: Any) -> EngineConfig:
    values: dict[str, Any] = {"model": Path("m"), "device": "cuda:0", "pool_pages": None, "memory_fraction": 0.9, "table_rows": 1}
    return EngineConfig(**(values | given))


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has\nmore"),
            "out of memory on cuda:1: Tried to allocate 2.00 GiB. GPU 1 has",
        ),
        (RuntimeError("CUDA error: device-side assert\nCompile with"), "cuda:1: CUDA error: device-side assert"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), "out of memory: [enforce fail] DefaultCPU"),
        (MemoryError(), "out of memory: the machine has no more"),
        (StartError("weights have no tensor x"), "weights have no tensor x"),
        (
            ModuleNotFoundError("No module named 'flashinfer'", name="flashinfer.decode"),
            "--device cuda:1 needs flashinfer.decode: pip install '.[cuda]'",
        ),
    ],
)
def test_what_a_start_lacks_is_one_line(error: Exception, line: str, two_gpus: None) -> None:
    with pytest.raises(StartError) as caught, starting_on("cuda:1"):
        raise error
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)


def test_a_mistake_of_ours_keeps_its_traceback(two_gpus: None) -> None:
    with pytest.raises(RuntimeError, match="shapes differ"), starting_on("cuda:0"):
        raise RuntimeError("shapes differ")
    with pytest.raises(ModuleNotFoundError), starting_on("cuda:0"):
        raise ModuleNotFoundError("No module named 'common.engine.cuda.bild'", name="common.engine.cuda.bild")
    with pytest.raises(RuntimeError, match="CUDA"), starting_on("cpu"):
        raise RuntimeError("CUDA on a CPU")


def test_a_gpu_beyond_the_last_is_refused_before_anything_is_built(two_gpus: None) -> None:
    with (
        pytest.raises(StartError, match="^--device cuda:2: there is no such GPU here, only cuda:0 to cuda:1$"),
        starting_on("cuda:2"),
    ):
        raise AssertionError("not reached")


def test_a_machine_without_a_gpu_and_a_torch_without_cuda_are_told_apart(two_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(StartError, match="^--device cuda:0: torch sees no GPU here$"):
        start.check_device("cuda:0")
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(StartError, match="^--device cuda:0: torch .* is a build without CUDA$"):
        start.check_device("cuda:0")
    start.check_device("cpu")


def test_the_pool_gets_what_the_worker_leaves_of_its_fraction() -> None:
    assert pages_that_fit(config(), CARD, page_bytes=GIB) == 90 - 20
    assert pages_that_fit(config(), CARD, page_bytes=GIB, reserved_bytes=3 * GIB) == 90 - 20 - 3
    assert pages_that_fit(config(memory_fraction=0.45), CARD, page_bytes=GIB) == 45 - 20


def test_the_pool_gets_no_more_than_is_free_or_asked_for() -> None:
    assert pages_that_fit(config(), CARD._replace(free=10 * GIB), page_bytes=GIB) == 10
    assert pages_that_fit(config(pool_bytes=5 * GIB), CARD, page_bytes=GIB) == 5
    assert size_pool(config(pool_pages=7), page_bytes=GIB) == 7


def test_a_pool_that_does_not_fit_is_one_line_with_the_figures() -> None:
    with pytest.raises(StartError) as caught:
        pages_that_fit(config(memory_fraction=0.2), CARD, page_bytes=GIB)
    assert str(caught.value) == (
        "no room for a KV pool on cuda:0: --memory-fraction 0.2 of 102400 MiB is 20480, weights and workspace take 20480, "
        "graphs 0, 81920 are free, a page needs 1024.0"
    )


def test_a_workers_options_reach_its_engine() -> None:
    worker = Config(model=Path("m"), device="cuda", pool_memory_mb=3, prefill_attention="torch")
    engine = engine_config(worker, pool_pages=None)
    assert (engine.device, engine.dtype, engine.page_size, engine.table_rows) == ("cuda:0", "bfloat16", 64, 64)
    assert (engine.memory_fraction, engine.pool_bytes, engine.prefill_attention) == (0.9, 3 << 20, "torch")
