"""Qwen3 against transformers: heads that are normed, and of a width of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.helpers.engine_driver import EngineDriver, engine
from tests.helpers.prompts import prompt
from tests.helpers.reference import greedy
from tests.helpers.tiny_model import make_tiny_model

NEW_TOKENS = 64
LENGTHS = (1, 2, 7, 8, 15, 16, 17, 32, 33, 63, 64, 65, 128, 129, 300)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("qwen3"), qwen3=True, head_dim=24)


@pytest.mark.parametrize("chunk_tokens", [7, 4096])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_qwen3_greedy_equals_transformers(qwen3: Path, page_size: int, chunk_tokens: int) -> None:
    prompts = [prompt(length, seed=5) for length in LENGTHS]
    with engine(qwen3, page_size=page_size) as runner:
        outputs = EngineDriver(runner).generate(prompts, max_tokens=NEW_TOKENS, chunk_tokens=chunk_tokens)
    assert outputs == [greedy(qwen3, ids, NEW_TOKENS) for ids in prompts]


@pytest.mark.parametrize(
    "variant",
    [
        {"tie": True},
        {"hidden": 48, "heads": 4, "kv_heads": 1, "head_dim": 32},
        {"bias": True, "config": {"mlp_bias": False}},
        {"shards": 2, "config": {"use_sliding_window": False, "sliding_window": None, "max_window_layers": 2}},
        {"config": {"rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}}},
    ],
    ids=["tied", "wide-heads", "bias", "no-window", "rope-theta"],
)
def test_every_shape_of_qwen3_equals_transformers(tmp_path: Path, variant: dict[str, Any]) -> None:
    model = make_tiny_model(tmp_path, qwen3=True, **variant)
    prompts = [prompt(length, seed=6) for length in (1, 17, 90)]
    with engine(model) as runner:
        assert EngineDriver(runner).generate(prompts, max_tokens=12, chunk_tokens=64) == [
            greedy(model, ids, 12) for ids in prompts
        ]


def test_q_and_k_norms_matter(qwen3: Path, tmp_path: Path) -> None:
    """Or the tests of Qwen3 would not see them left out."""
    plain = make_tiny_model(tmp_path, head_dim=24)
    weights = load_file(qwen3 / "model.safetensors")
    without = {name: tensor for name, tensor in weights.items() if not name.endswith(("q_norm.weight", "k_norm.weight"))}
    save_file(without, plain / "model.safetensors", metadata={"format": "pt"})
    assert greedy(plain, prompt(17, seed=5), 12) != greedy(qwen3, prompt(17, seed=5), 12)
