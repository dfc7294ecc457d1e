"""ModelConfig: a model's shape, read from a model folder's config.json and checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

from common.errors import StartError
from common.model_dir import ModelDir


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched for longer contexts.

    factor: 1 / factor is applied to every frequency (kind linear) or to the low ones (llama3).
    low_freq_factor, high_freq_factor, original_max_context: llama3 only; wavelengths above original_max_context / low_freq_factor
    are stretched, those below original_max_context / high_freq_factor are not, and between them it fades.
    """

    kind: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_context: int = 0


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """num_heads: query heads; num_kv_heads divides it. head_dim need not be hidden_size / num_heads. max_context in tokens.
    qk_norm: every query and key head has an RMSNorm before it is rotated (Qwen3).
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    qk_norm: bool
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    max_context: int

    @classmethod
    def of(cls, model: ModelDir) -> ModelConfig:
        """Raises StartError naming config.json and the entry that is missing, wrong or not supported."""
        entries = _Entries(model)
        hidden_size = entries.integer("hidden_size")
        num_heads = entries.integer("num_attention_heads")
        rope = entries.rope()
        is_qwen3 = model.architecture == "Qwen3ForCausalLM"
        config = cls(
            architecture=model.architecture,
            vocab_size=model.vocab_size,
            hidden_size=hidden_size,
            intermediate_size=entries.integer("intermediate_size"),
            num_layers=entries.integer("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=entries.integer("num_key_value_heads", num_heads),
            head_dim=entries.integer("head_dim", 128 if is_qwen3 else hidden_size // num_heads),
            rms_norm_eps=entries.number("rms_norm_eps", 1e-6),
            rope_theta=rope.number("rope_theta", 10000.0),
            rope_scaling=_rope_scaling(rope),
            qk_norm=is_qwen3,
            tie_word_embeddings=bool(entries.get("tie_word_embeddings", False)),
            attention_bias=bool(entries.get("attention_bias", False)),
            mlp_bias=bool(entries.get("mlp_bias", False)),
            max_context=model.max_context,
        )
        _check(config, entries)
        return config


class _Entries:
    """config.json's entries, or those of an object inside it, by name; null counts as absent."""

    def __init__(self, model: ModelDir, values: dict[str, Any] | None = None) -> None:
        self._model = model
        self._values = model.config if values is None else values

    def get(self, name: str, default: Any = None) -> Any:
        value = self._values.get(name)
        return default if value is None else value

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            self.refuse(name, "must be a positive integer", value)
        return int(value)

    def number(self, name: str, default: float | None = None) -> float:
        value = self.get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            self.refuse(name, "must be a positive number", value)
        return float(value)

    def mapping(self, name: str) -> dict[str, Any]:
        value = self.get(name, {})
        if not isinstance(value, dict):
            self.refuse(name, "must be an object", value)
        return value

    def rope(self) -> _Entries:
        """All about rope in one object: newer files have rope_parameters, older ones rope_theta and rope_scaling."""
        older = {"rope_theta": self.get("rope_theta")} | self.mapping("rope_scaling")
        return _Entries(self._model, older | self.mapping("rope_parameters"))

    def refuse(self, name: str, rule: str, given: object) -> NoReturn:
        raise StartError(f"{self._model.path / 'config.json'}: {name} {rule}, got {given!r}")


def _check(config: ModelConfig, entries: _Entries) -> None:
    """What each entry may be, beside the others and for what is computed here."""
    if config.num_heads % config.num_kv_heads:
        entries.refuse("num_key_value_heads", f"must divide num_attention_heads ({config.num_heads})", config.num_kv_heads)
    if config.head_dim % 2:
        entries.refuse("head_dim", "must be even", config.head_dim)
    if (activation := entries.get("hidden_act", "silu")) != "silu":
        entries.refuse("hidden_act", "must be 'silu'", activation)
    if (sliding := entries.get("use_sliding_window", False)) is not False:
        entries.refuse("use_sliding_window", "must be false", sliding)
    for kind in entries.get("layer_types", []):
        if kind != "full_attention":
            entries.refuse("layer_types", "must be 'full_attention' only", kind)


def _rope_scaling(rope: _Entries) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        rope.refuse("partial_rotary_factor", "must be 1", rope.get("partial_rotary_factor"))
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling(kind=kind, factor=rope.number("factor"))
    if kind != "llama3":
        rope.refuse("rope_type", "must be 'default', 'linear' or 'llama3'", kind)
    return RopeScaling(
        kind=kind,
        factor=rope.number("factor"),
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
        original_max_context=rope.integer("original_max_position_embeddings"),
    )
