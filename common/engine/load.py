"""LoadedModel: a model on its device, and what its peers must have in common with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import torch

from common.engine import kv_pool
from common.engine.config import EngineConfig
from common.engine.cpu_linear import is_widened
from common.engine.model_config import ModelConfig
from common.engine.models.registry import Model, build_model
from common.engine.ops import ops_for
from common.engine.weights import open_weights
from common.errors import StartError
from common.fingerprint import fingerprint
from common.model_dir import ModelDir
from common.work import Compatibility

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class KvGeometry(TypedDict):
    num_layers: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    model: Model
    shape: ModelConfig
    dtype: torch.dtype
    compatibility: Compatibility
    eos_token_ids: frozenset[int]

    @property
    def kv_geometry(self) -> KvGeometry:
        return kv_geometry(self.shape)

    def page_bytes(self, page_size: int) -> int:
        """Of one KV page over all layers."""
        return kv_pool.page_bytes(page_size=page_size, dtype=self.dtype, **self.kv_geometry)


def load_model(config: EngineConfig, progress: Callable[[str], None]) -> LoadedModel:
    """Raises StartError, one line, for whatever is wrong with the model folder or does not fit this engine.

    progress: gets a line now and then. Call it in the thread that will run the model."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    is_dummy = config.load_format == "dummy"
    folder = ModelDir.open(config.model, need_weights=not is_dummy, need_tokenizer=not is_dummy)
    shape, dtype, device = ModelConfig.of(folder), dtype_of(config.dtype), config.device
    max_context = _effective_context(config, shape, progress)
    weights = open_weights(folder, progress, load_format=config.load_format, dtype=dtype, device=device)
    model = build_model(shape, weights, ops_for(device, many_rows=not config.decodes), max_context=max_context)
    weights.finish()
    if is_widened(dtype, torch.device(device)):
        progress(f"this machine does not compute in {config.dtype}: products are float32's, of weights in {config.dtype}")
    return LoadedModel(
        model=model,
        shape=shape,
        dtype=dtype,
        compatibility=Compatibility(
            fingerprint(folder), config.dtype, page_size=config.page_size, max_context=max_context, **kv_geometry(shape)
        ),
        eos_token_ids=frozenset(folder.eos_token_ids),
    )


def page_bytes(model: Path, *, page_size: int, dtype: str) -> int:
    """Bytes of one KV page of this model, for sizing a pool before it is made. Raises StartError."""
    shape = ModelConfig.of(ModelDir.open(model, need_weights=False, need_tokenizer=False))
    return kv_pool.page_bytes(page_size=page_size, dtype=dtype_of(dtype), **kv_geometry(shape))


def kv_geometry(shape: ModelConfig) -> KvGeometry:
    return {"num_layers": shape.num_layers, "num_kv_heads": shape.num_kv_heads, "head_dim": shape.head_dim}


def dtype_of(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise StartError(f"dtype must be one of {', '.join(DTYPES)}, got {name!r}")
    return DTYPES[name]


def _effective_context(config: EngineConfig, shape: ModelConfig, progress: Callable[[str], None]) -> int:
    """The lesser of what is asked for and what the model was made for; says so if it was cut."""
    wanted = config.max_context or shape.max_context
    possible = min(wanted, shape.max_context)
    if possible < wanted:
        progress(f"max context is {possible} tokens, the model's, not {wanted}")
    return possible
