"""Which class computes which architecture."""

from __future__ import annotations

from typing import Protocol

import torch

from common.engine.model_config import ModelConfig
from common.engine.models.dense import DenseModel
from common.engine.ops import Ops
from common.engine.weights import WeightSource

MODELS = {"LlamaForCausalLM": DenseModel, "Qwen3ForCausalLM": DenseModel}
"""By the name in config.json; the names are common.model_dir.ARCHITECTURES."""


class Model(Protocol):
    config: ModelConfig

    def forward(self) -> torch.Tensor:
        """Computes the global Context's batch: stores its K and V; returns [requests with is_last_chunk, vocab_size] logits."""


def build_model(config: ModelConfig, weights: WeightSource, ops: Ops, *, max_context: int) -> Model:
    """The model with its weights, ready to run. Raises StartError if they lack a tensor. max_context: positions to come."""
    with torch.inference_mode():
        return MODELS[config.architecture](config, weights, ops, max_context=max_context)
