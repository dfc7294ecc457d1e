"""Weights come from safetensors to the GPU as they are in the file, or converted there."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from common.engine.weights import open_weights
from common.model_dir import ModelDir
from tests.helpers.tiny_model import make_tiny_model

pytestmark = pytest.mark.gpu
LAYER = "model.layers.1.self_attn."


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("written", [torch.bfloat16, torch.float32])
def test_tensors_are_the_file_s_whole_and_stacked(
    tmp_path: Path, device: torch.device, written: torch.dtype, dtype: torch.dtype
) -> None:
    folder = ModelDir.open(make_tiny_model(tmp_path, shards=3, dtype=written))
    there = {name: tensor for path in folder.weight_files for name, tensor in load_file(path).items()}
    lines: list[str] = []
    weights = open_weights(folder, lines.append, load_format="safetensors", dtype=dtype, device=str(device))
    single = {name: weights.tensor(name, *tensor.shape) for name, tensor in there.items()}
    parts = [f"{LAYER}{name}_proj.weight" for name in "qkv"]
    stacked = weights.stacked([(name, len(there[name])) for name in parts], there[parts[0]].shape[1])
    weights.finish()
    for name, tensor in single.items():
        assert tensor.device.type == device.type and tensor.is_contiguous() and tensor.dtype == dtype
        assert torch.equal(tensor.cpu(), there[name].to(dtype)), name
    assert torch.equal(stacked.cpu(), torch.cat([there[name] for name in parts]).to(dtype))
    assert f"loaded {len(there) + 3} tensors" in lines[-1]
