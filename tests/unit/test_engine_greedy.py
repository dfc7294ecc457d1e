"""ModelRunner against transformers: the same greedy tokens, however prompts are cut, paged and batched."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.core import SamplingParams, reset_global_ctx
from common.engine.model_runner import EngineConfig, ModelRunner, page_bytes
from tests.helpers.engine_driver import EngineDriver, engine
from tests.helpers.reference import greedy
from tests.helpers.tiny_model import make_tiny_model

NEW_TOKENS = 64
LENGTHS = (1, 2, 5, 6, 7, 8, 13, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 70, 127, 128, 129, 300, 701, 2000)
"""Among them 1, page - 1, page, page + 1, 2 * page (pages of 1, 16, 64) and chunk - 1, chunk, chunk + 1 (chunks of 7, 64)."""


def random_prompts(lengths: Sequence[int], *, vocab: int = 384) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, vocab, (length,), generator=generator).tolist() for length in lengths]


PROMPTS = random_prompts(LENGTHS)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def reference(model: Path) -> list[list[int]]:
    torch.set_num_threads(1)
    return [greedy(model, prompt, NEW_TOKENS) for prompt in PROMPTS]


@pytest.mark.parametrize("chunk_tokens", [7, 64, 4096])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_greedy_equals_transformers_batched_by_16_and_alone_bnd_05(
    model: Path, reference: list[list[int]], page_size: int, chunk_tokens: int
) -> None:
    with engine(model, page_size=page_size) as runner:
        driver = EngineDriver(runner)
        together = [
            output
            for part in (PROMPTS[:16], PROMPTS[16:])
            for output in driver.generate(part, max_tokens=NEW_TOKENS, chunk_tokens=chunk_tokens)
        ]
        assert together == reference
        short = range(len(PROMPTS) - 2)
        alone = [driver.generate([PROMPTS[i]], max_tokens=NEW_TOKENS, chunk_tokens=chunk_tokens)[0] for i in short]
        assert alone == reference[:-2]


def test_sequences_shorter_than_a_page_batch_like_alone_bnd_07(model: Path) -> None:
    prompts = random_prompts([1 + i % 15 for i in range(16)])
    with engine(model) as runner:
        driver = EngineDriver(runner)
        alone = [driver.generate([prompt], max_tokens=16)[0] for prompt in prompts]
        assert driver.generate(prompts, max_tokens=16) == alone
        assert len({tuple(output) for output in alone}) == 16


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("chunk_tokens", [7, 4096])
def test_a_prefix_computed_for_another_request_gives_the_same_tokens(
    model: Path, reference: list[list[int]], page_size: int, chunk_tokens: int
) -> None:
    with engine(model, page_size=page_size) as runner:
        driver = EngineDriver(runner)
        for i in (LENGTHS.index(128), LENGTHS.index(129), LENGTHS.index(701)):
            first = driver.add(PROMPTS[i], max_tokens=1)
            driver.prefill([first])
            hits = [page_size, 64, (LENGTHS[i] - 1) // page_size * page_size]
            reqs = [driver.add(PROMPTS[i], max_tokens=NEW_TOKENS, prefix_of=first, cached_len=hit) for hit in hits]
            driver.finish(reqs, chunk_tokens=chunk_tokens)
            assert [driver.output(req) for req in reqs] == [reference[i]] * 3


def test_prefill_and_decode_may_share_a_batch(model: Path, reference: list[list[int]]) -> None:
    with engine(model) as runner:
        driver = EngineDriver(runner)
        older, newer = LENGTHS.index(65), LENGTHS.index(33)
        running = driver.add(PROMPTS[older], max_tokens=NEW_TOKENS)
        driver.prefill([running])
        joining = driver.add(PROMPTS[newer], max_tokens=NEW_TOKENS)
        driver.prefill([running, joining])
        driver.finish([running, joining])
        assert [driver.output(running), driver.output(joining)] == [reference[older], reference[newer]]


@pytest.mark.parametrize(
    "variant",
    [
        {"tie": True},
        {"bias": True},
        {"shards": 3, "layers": 3},
        {"hidden": 72, "heads": 9, "kv_heads": 3, "head_dim": 8, "intermediate": 96},
        {"hidden": 48, "heads": 3, "kv_heads": 3, "head_dim": 32},
        {"heads": 4, "kv_heads": 1},
        {"config": {"rope_theta": 500000.0}},
        {"config": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}},
        {
            "config": {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "rope_theta": 10000.0,
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 64,
                }
            }
        },
    ],
    ids=["tied", "bias", "sharded", "grouped", "ungrouped", "one-kv-head", "rope-theta", "rope-linear", "rope-llama3"],
)
def test_every_shape_of_llama_equals_transformers(tmp_path: Path, variant: dict[str, Any]) -> None:
    model = make_tiny_model(tmp_path, **variant)
    prompts = random_prompts([1, 17, 90])
    with engine(model) as runner:
        assert EngineDriver(runner).generate(prompts, max_tokens=12, chunk_tokens=64) == [
            greedy(model, prompt, 12) for prompt in prompts
        ]


@pytest.mark.parametrize(("narrow", "tolerance"), [("bfloat16", 0.3), ("float16", 0.05)])
def test_narrow_dtypes_give_the_float32_logits_within_their_precision(model: Path, narrow: str, tolerance: float) -> None:
    logprobs = []
    for dtype in ("float32", narrow):
        with engine(model, dtype=dtype) as runner:
            driver = EngineDriver(runner)
            req = driver.add(PROMPTS[LENGTHS.index(300)], max_tokens=1, logprobs=20)
            driver.prefill([req], chunk_tokens=64)
            logprobs.append(dict(driver.sampled[req][0].top))
            assert runner.pool.tensor.dtype == runner.pool.k(0).dtype == getattr(torch, dtype)
    shared = logprobs[0].keys() & logprobs[1].keys()
    assert len(shared) >= 15
    assert max(abs(logprobs[0][token] - logprobs[1][token]) for token in shared) < tolerance


def test_n_completions_start_from_one_prefill(model: Path) -> None:
    params = SamplingParams(temperature=3.0, seed=11)
    with engine(model) as runner:
        driver = EngineDriver(runner)
        four = driver.add(PROMPTS[3], max_tokens=1, params=params, n=4)
        ones = [driver.add(PROMPTS[3], max_tokens=1, params=params, completion=i) for i in range(4)]
        driver.prefill([four, *ones])
        assert driver.sampled[four] == [driver.sampled[req][0] for req in ones]
        assert len({sampled.token_id for sampled in driver.sampled[four]}) > 1


def test_the_pool_may_live_in_given_memory(model: Path, reference: list[list[int]]) -> None:
    memory = bytearray(64 * page_bytes(model, page_size=16, dtype="float32"))
    reset_global_ctx()
    config = EngineConfig(model=model, pool_pages=64, table_rows=4, threads=1)
    runner = ModelRunner.load(config, pool_storage=memoryview(memory))
    try:
        assert EngineDriver(runner).generate([PROMPTS[9]], max_tokens=NEW_TOKENS) == [reference[9]]
        assert any(memory)
    finally:
        reset_global_ctx()


def test_max_context_is_cut_to_the_models_and_not_to_the_pool(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path, max_context=100)
    for pool_tokens, asked, effective in ((1024, None, 100), (1024, 33, 33), (1024, 1000, 100), (64, 100, 100)):
        with engine(model, pool_tokens=pool_tokens, max_context=asked) as runner:
            assert runner.compatibility.max_context == effective


def test_the_last_position_of_the_context_can_be_computed_bnd_09(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path, max_context=33)
    prompt = random_prompts([30])[0]
    with engine(model, page_size=16) as runner:
        assert EngineDriver(runner).generate([prompt], max_tokens=3) == [greedy(model, prompt, 3)]


def test_no_other_requests_bytes_reach_a_shorter_one_in_the_same_batch(model: Path, reference: list[list[int]]) -> None:
    """A page that is not this request's may hold anything, NaN too."""
    with engine(model) as runner:
        driver = EngineDriver(runner)
        short, long = LENGTHS.index(48), LENGTHS.index(64)
        reqs = [driver.add(PROMPTS[i], max_tokens=NEW_TOKENS) for i in (short, long)]
        used = {page for req in reqs for page in driver.pages[req]}
        for page in set(range(runner.pool.num_pages)) - used:
            runner.pool.tensor[page] = float("nan")
        # Left over from a row's last owner:
        unused = next(iter(set(range(runner.pool.num_pages)) - used))
        runner.page_table.tensor[reqs[0].table_idx, len(driver.pages[reqs[0]]) * 16 :] = unused * 16
        driver.finish(reqs)
        assert [driver.output(req) for req in reqs] == [reference[short], reference[long]]


def test_untied_weights_of_another_dtype_are_converted(tmp_path: Path, model: Path, reference: list[list[int]]) -> None:
    copy = make_tiny_model(tmp_path)
    weights = {name: tensor.double() for name, tensor in load_file(model / "model.safetensors").items()}
    save_file(weights, copy / "model.safetensors")
    with engine(copy) as runner:
        assert EngineDriver(runner).generate([PROMPTS[5]], max_tokens=NEW_TOKENS) == [reference[5]]
