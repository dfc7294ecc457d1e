"""The geometries that benchmarks name are those models': their published numbers of parameters, and folders that are served."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.geometries import GEOMETRIES, write_model
from common.engine.model_config import ModelConfig
from common.model_dir import ModelDir
from router.text.tokenizer import Tokenizer

pytestmark = pytest.mark.unit


def parameters(config: ModelConfig) -> int:
    hidden, heads = config.hidden_size, config.num_heads + config.num_kv_heads
    attention = 2 * hidden * heads * config.head_dim + (2 * config.head_dim if config.qk_norm else 0)
    layer = attention + 3 * hidden * config.intermediate_size + 2 * hidden
    embeddings = config.vocab_size * hidden * (1 if config.tie_word_embeddings else 2)
    return config.num_layers * layer + embeddings + hidden


@pytest.mark.parametrize(
    ("name", "count", "ends"),
    [
        ("SmolLM2-135M", 134_515_008, (2,)),
        ("Qwen3-0.6B", 596_049_920, (151643, 151645)),
        ("Llama-3-8B", 8_030_261_248, (128001, 128009)),
    ],
)
def test_a_geometry_has_as_many_parameters_as_the_model(tmp_path: Path, name: str, count: int, ends: tuple[int, ...]) -> None:
    model = ModelDir.open(write_model(tmp_path / name, name, max_context=32768), need_weights=False)
    assert parameters(ModelConfig.of(model)) == count
    assert (model.max_context, model.eos_token_ids) == (32768, ends)


def test_a_router_can_read_the_folder(tmp_path: Path) -> None:
    name = "SmolLM2-135M"
    model = ModelDir.open(write_model(tmp_path, name), need_weights=False)
    tokenizer = Tokenizer(model)
    assert tokenizer.vocab_size == GEOMETRIES[name]["vocab_size"]
    assert tokenizer.decode(tokenizer.encode("The capital"), include_special=False) == "The capital"
