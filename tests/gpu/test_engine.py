"""The GPU engine as a whole, in bf16: prefill in chunks, then captured decode steps, against transformers in float32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flashinfer", reason="flashinfer is not installed")

from common.batch_sizes import BatchSizes
from common.core import Req, SamplingParams, reset_global_ctx
from common.engine.config import EngineConfig
from common.engine.runner import Sampled
from decode_worker.build import build_runner
from decode_worker.grammar_masks import MaskSource
from decode_worker.graph_runner import GraphRunner
from tests.helpers import reference
from tests.helpers.engine_driver import EngineDriver
from tests.helpers.tiny_model import make_tiny_model

PAGE_SIZE = 64
SIZES = BatchSizes((1, 2, 4, 8))
MAX_ERROR = 2e-2
TOP = 20
ROWS = 16


@pytest.fixture(autouse=True)
def _needs_gpu(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("this engine runs on a GPU only")


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    shape: dict[str, Any] = {"hidden": 256, "heads": 8, "kv_heads": 2, "head_dim": 64, "layers": 3, "vocab": 700}
    return make_tiny_model(folder, qwen3=request.param == "qwen3", dtype=torch.bfloat16, max_context=2048, **shape)


@contextmanager
def gpu_engine(
    model: Path, *, sizes: BatchSizes = SIZES, masks: MaskSource | None = None, **config: Any
) -> Iterator[GraphRunner]:
    reset_global_ctx()
    try:
        engine = EngineConfig(
            model=model,
            device="cuda:0",
            dtype="bfloat16",
            page_size=PAGE_SIZE,
            pool_pages=600,
            chunk_tokens=8192,
            table_rows=ROWS,
            graph_sizes=sizes,
            **config,
        )
        runner = build_runner(engine, None, lambda text: None, masks=masks)
        assert isinstance(runner, GraphRunner)
        runner.pool.tensor.fill_(float("nan"))  # What nobody wrote must not be read.
        runner.pool.tensor[-1].zero_()
        yield runner
    finally:
        reset_global_ctx()


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = [1, 63, 64, 65, 128, 500, 3, 1000, 17, 90, 129, 300][:count]
    return [torch.randint(3, 600, (length,), generator=generator).tolist() for length in lengths]


def assert_near_reference(model: Path, req: Req, sampled: list[Sampled]) -> None:
    """The best logits of every step, given the tokens before it."""
    logits = reference.logits(model, req.input_ids.tolist())[req.prompt_len - 1 : -1]
    top = torch.tensor([[token for token, _ in one.top] for one in sampled])
    # Log-probabilities are logits less a constant, which the reference supplies.
    got = torch.tensor([[value for _, value in one.top] for one in sampled]) + logits.logsumexp(-1, keepdim=True)
    wanted = logits.gather(1, top)
    error = (got - wanted).norm() / wanted.norm()
    assert error < MAX_ERROR, f"{req!r}: relative error {error:.1e}"


@pytest.mark.parametrize("count", [1, 2, 3, 8, 12])
@pytest.mark.parametrize("chunk_tokens", [8192, 100])
def test_prefill_and_captured_decode_are_near_the_float32_reference(model: Path, count: int, chunk_tokens: int) -> None:
    with gpu_engine(model) as runner:
        driver = EngineDriver(runner)
        params = SamplingParams(max_tokens=70, ignore_eos=True)
        reqs = [driver.add(prompt, max_tokens=70, params=params, logprobs=TOP) for prompt in prompts(count)]
        driver.finish(reqs, chunk_tokens=chunk_tokens)
        for req in reqs:
            assert len(driver.sampled[req]) == 70
            assert_near_reference(model, req, driver.sampled[req])


def test_steps_launched_ahead_give_the_tokens_of_steps_read_one_by_one(model: Path) -> None:
    outputs = []
    for ahead in (False, True):
        with gpu_engine(model) as runner:
            driver = EngineDriver(runner)
            reqs = [driver.add(prompt, max_tokens=40) for prompt in prompts(5)]
            driver.prefill(reqs)
            driver.decode_all(reqs, ahead=ahead)
            outputs.append([[one.token_id for one in driver.sampled[req]] for req in reqs])
    assert outputs[0] == outputs[1]


def test_a_captured_step_is_the_step_launched_kernel_by_kernel(model: Path) -> None:
    outputs = []
    for sizes in (SIZES, BatchSizes()):
        with gpu_engine(model, sizes=sizes) as runner:
            driver = EngineDriver(runner)
            reqs = [driver.add(prompt, max_tokens=40) for prompt in prompts(8)]
            driver.finish(reqs)
            outputs.append([[one.token_id for one in driver.sampled[req]] for req in reqs])
    assert outputs[0] == outputs[1]


def test_seeded_sampling_does_not_depend_on_the_batch(model: Path) -> None:
    """Same padded size, other company."""
    params = SamplingParams(temperature=0.9, top_p=0.9, top_k=50, seed=7, max_tokens=30, ignore_eos=True)
    outputs = []
    for company in (prompts(7, seed=1), prompts(7, seed=2)):
        with gpu_engine(model, sizes=BatchSizes((8,))) as runner:
            driver = EngineDriver(runner)
            mine = driver.add(list(range(3, 80)), max_tokens=30, params=params)
            others = [driver.add(prompt, max_tokens=30) for prompt in company]
            driver.prefill([mine])
            driver.prefill(others)
            driver.decode_all([mine, *others])
            outputs.append([one.token_id for one in driver.sampled[mine]])
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("kernel", ["triton", "xqa", "flashinfer", "torch"])
def test_every_decode_kernel_is_near_the_float32_reference(tmp_path: Path, kernel: str) -> None:
    """flashinfer plans on the CPU before each replay; torch cannot be captured at all."""
    shape: dict[str, Any] = {"hidden": 256, "heads": 4, "kv_heads": 2, "head_dim": 128, "layers": 2, "vocab": 700}
    folder = make_tiny_model(tmp_path, dtype=torch.bfloat16, max_context=2048, **shape)
    with gpu_engine(folder, decode_attention=kernel) as runner:
        driver = EngineDriver(runner)
        params = SamplingParams(max_tokens=70, ignore_eos=True)
        reqs = [driver.add(prompt, max_tokens=70, params=params, logprobs=TOP) for prompt in prompts(7)]
        driver.prefill(reqs)
        driver.decode_all(reqs, ahead=True)
        for req in reqs:
            assert_near_reference(folder, req, driver.sampled[req])
