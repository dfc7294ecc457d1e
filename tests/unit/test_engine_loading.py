"""What is wrong with a model's config or weights is one line that names the file and the entry."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.core import reset_global_ctx
from common.engine.model_config import ModelConfig
from common.engine.model_runner import EngineConfig, ModelRunner, page_bytes
from common.engine.models.registry import MODELS
from common.engine.weights import DummyWeights, Progress, SafetensorsWeights
from common.errors import StartError
from common.model_dir import ARCHITECTURES, ModelDir
from tests.helpers.engine_driver import EngineDriver, engine
from tests.helpers.tiny_model import make_tiny_model


def change_config(model: Path, **entries: Any) -> None:
    path = model / "config.json"
    values = json.loads(path.read_text()) | entries
    path.write_text(json.dumps({name: value for name, value in values.items() if value != "absent"}))


def load(model: Path) -> ModelRunner:
    return ModelRunner.load(EngineConfig(model=model, pool_pages=4, table_rows=1, threads=1))


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu', got 'gelu'"),
        ({"hidden_size": "absent"}, "hidden_size must be a positive integer, got None"),
        ({"intermediate_size": "many"}, "intermediate_size must be a positive integer, got 'many'"),
        ({"num_key_value_heads": 3}, r"num_key_value_heads must divide num_attention_heads \(4\), got 3"),
        ({"head_dim": 15}, "head_dim must be even, got 15"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a positive number, got nan"),
        ({"rope_theta": -1}, "rope_theta must be a positive number, got -1"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_type must be 'default', 'linear' or 'llama3', got 'yarn'"),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "rope_type must be 'default', 'linear' or 'llama3', got 'dynamic'",
        ),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor must be a positive number, got None"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor must be 1, got 0.5"),
        ({"use_sliding_window": True}, "use_sliding_window must be false, got True"),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types must be 'full_attention' only, got 'sliding_attention'",
        ),
        ({"rope_scaling": "linear"}, "rope_scaling must be an object, got 'linear'"),
    ],
    ids=str,
)
def test_a_config_that_cannot_be_computed_is_refused_by_name(tmp_path: Path, entries: dict[str, Any], message: str) -> None:
    model = make_tiny_model(tmp_path)
    change_config(model, **entries)
    with pytest.raises(StartError, match=f"config.json: {message}"):
        load(model)


def test_absent_entries_have_llamas_defaults(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path, heads=4, kv_heads=4, head_dim=16)
    change_config(
        model, **dict.fromkeys(("num_key_value_heads", "head_dim", "rope_theta", "attention_bias", "rms_norm_eps"), "absent")
    )
    config = ModelConfig.of(ModelDir.open(model))
    assert (config.num_kv_heads, config.head_dim, config.rope_theta, config.attention_bias) == (4, 16, 10000.0, False)
    assert config.rms_norm_eps == 1e-6


def test_absent_entries_have_qwen3s_defaults(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path, qwen3=True)
    change_config(model, **dict.fromkeys(("head_dim", "tie_word_embeddings", "attention_bias"), "absent"))
    config = ModelConfig.of(ModelDir.open(model))
    assert (config.head_dim, config.tie_word_embeddings, config.attention_bias, config.qk_norm) == (128, False, False, True)


def test_every_architecture_that_is_taken_has_a_model() -> None:
    assert set(MODELS) == set(ARCHITECTURES)


def test_rope_may_be_told_the_old_or_the_new_way(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path)
    llama3 = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    configs = []
    for entries in (
        {"rope_theta": 5000.0, "rope_scaling": llama3, "rope_parameters": "absent"},
        {"rope_theta": "absent", "rope_scaling": "absent", "rope_parameters": llama3 | {"rope_theta": 5000.0}},
    ):
        change_config(model, **entries)
        configs.append(ModelConfig.of(ModelDir.open(model)))
    assert configs[0] == configs[1]
    assert configs[0].rope_theta == 5000.0 and configs[0].rope_scaling is not None


@pytest.mark.parametrize("shards", [1, 2])
def test_a_missing_tensor_is_named(tmp_path: Path, shards: int) -> None:
    model = make_tiny_model(tmp_path, shards=shards)
    name = "model.layers.1.mlp.up_proj.weight"
    for file in model.glob("*.safetensors"):
        save_file({key: tensor for key, tensor in load_file(file).items() if key != name}, file)
    with pytest.raises(StartError, match=rf"weights in {model} have no tensor {name}"):
        load(model)


def test_a_tensor_of_another_shape_is_named_with_both(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path)
    change_config(model, intermediate_size=64)
    with pytest.raises(
        StartError, match=r"model.safetensors: tensor model.layers.0.mlp.\w+.weight must have shape \[64, 64\], got \[128, 64\]"
    ):
        load(model)


def test_a_shape_is_checked_before_memory_is_taken_for_it(tmp_path: Path) -> None:
    model = ModelDir.open(make_tiny_model(tmp_path))
    weights = SafetensorsWeights(model, lambda line: None, dtype=torch.float32, device="cpu")
    with pytest.raises(StartError, match=r"lm_head.weight must have shape \[1152921504606846976, 64\], got \[384, 64\]"):
        weights.stacked([("model.embed_tokens.weight", 384), ("lm_head.weight", 1 << 60)], 64)


def test_parts_lie_one_below_the_other_in_the_dtype_asked_for(tmp_path: Path) -> None:
    model = ModelDir.open(make_tiny_model(tmp_path, shards=2))
    given = {name: tensor for file in model.weight_files for name, tensor in load_file(file).items()}
    names = ["model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight", "model.norm.weight"]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        weights = SafetensorsWeights(model, lambda line: None, dtype=dtype, device="cpu")
        whole = weights.stacked([(names[0], 384), (names[1], 128)], 64)
        assert torch.equal(whole, torch.cat([given[names[0]], given[names[1]]]).to(dtype))
        assert torch.equal(weights.tensor(names[2], 64), given[names[2]].to(dtype))


def test_dummy_weights_are_the_same_numbers_in_every_dtype_fused_or_not() -> None:
    float32, bfloat16, apart = (
        DummyWeights(lambda line: None, dtype=dtype, device="cpu") for dtype in (torch.float32, torch.bfloat16, torch.float32)
    )
    whole = float32.stacked([("q", 3), ("k", 2)], 16)
    assert torch.equal(bfloat16.stacked([("q", 3), ("k", 2)], 16), whole.bfloat16())
    assert torch.equal(torch.cat([apart.tensor("q", 3, 16), apart.tensor("k", 2, 16)]), whole)
    assert float32.tensor("q.bias", 4).tolist() == [0.0] * 4 and float32.tensor("norm.weight", 4).tolist() == [1.0] * 4


def test_quantized_tensors_are_refused(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path)
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"].to(torch.int8)
    save_file(weights, model / "model.safetensors")
    with pytest.raises(StartError, match="tensor model.norm.weight must be one of F64, F32, F16, BF16, got I8"):
        load(model)


def test_a_file_that_is_not_safetensors_is_named(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path)
    (model / "model.safetensors").write_bytes(b"not weights" * 100)
    with pytest.raises(StartError, match=r"model\.safetensors"):
        load(model)


def test_an_unknown_dtype_is_refused(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path)
    with pytest.raises(StartError, match="dtype must be one of float32, bfloat16, float16, got 'int4'"):
        page_bytes(model, page_size=16, dtype="int4")


def test_dummy_weights_need_a_config_only(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path)
    for file in model.iterdir():
        if file.name != "config.json":
            file.unlink()
    outputs = []
    for _ in range(2):
        with engine(model, load_format="dummy") as runner:
            outputs.append(EngineDriver(runner).generate([[1, 2, 3]], max_tokens=8))
    assert outputs[0] == outputs[1]


def test_page_bytes_are_the_pools(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path)
    for dtype in ("float32", "bfloat16"):
        with engine(model, dtype=dtype, page_size=8) as runner:
            assert page_bytes(model, page_size=8, dtype=dtype) == runner.pool.page_bytes


def test_progress_is_a_line_now_and_then_and_one_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("common.engine.weights.time.monotonic", lambda: now[0])
    lines: list[str] = []
    progress = Progress(lines.append, total_bytes=6 << 30)
    for _ in range(6):
        now[0] += 0.4
        progress.add(1 << 30)
    assert lines == [f"loading weights: {tensor} tensors, {tensor}.00 of 6.00 GiB" for tensor in (3, 6)]
    now[0] += 0.6
    progress.finish()
    assert lines[2:] == ["loaded 6 tensors, 6.00 GiB in 3.0 s (2.00 GiB/s)"]


def test_loading_ends_with_a_line(tmp_path: Path) -> None:
    lines: list[str] = []
    reset_global_ctx()
    config = EngineConfig(model=make_tiny_model(tmp_path), pool_pages=4, table_rows=1, threads=1, max_context=64)
    ModelRunner.load(config, progress=lines.append)
    reset_global_ctx()
    assert lines[-1].startswith("loaded 21 tensors, 0.00 GiB in ")
