"""A random Llama or Qwen3 in a Hugging Face folder: small enough for a test, spread enough that greedy has clear winners."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

BOS = "<|im_start|>"
EOS = "<|im_end|>"
COMMON_PAIRS = [
    "Ġt",
    "Ġa",
    "Ġs",
    "Ġw",
    "Ġo",
    "th",
    "he",
    "in",
    "er",
    "an",
    "re",
    "on",
    "at",
    "en",
    "nd",
    "ti",
    "es",
    "or",
    "te",
    "of",
]

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def make_tiny_model(
    folder: str | Path,
    *,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    intermediate: int | None = None,
    vocab: int = 384,
    qwen3: bool = False,
    max_context: int = 4096,
    seed: int = 0,
    eos: int | Sequence[int] | None = None,
    tie: bool = False,
    bias: bool = False,
    dtype: torch.dtype = torch.float32,
    shards: int = 1,
    chat_template: bool = True,
    config: dict[str, Any] | None = None,
) -> Path:
    """Writes config, generation config, tokenizer files and safetensors (with an index if shards > 1); returns the folder.

    vocab: 256 bytes, then pairs of letters, then <|im_start|> (vocab - 2) and <|im_end|> (vocab - 1, EOS and PAD).
    qwen3: a Qwen3, with q and k norms, instead of a Llama.
    eos: the generation config's end ids; default <|im_end|>. bias: attention and MLP biases. shards: weight files.
    config: more entries of config.json, e.g. {"rope_parameters": ...}.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.safetensors*"):
        old.unlink()
    _write_tokenizer(folder, vocab, max_context, chat_template)
    end_ids = vocab - 1 if eos is None else eos if isinstance(eos, int) else list(eos)
    values: dict[str, Any] = {
        "architectures": ["Qwen3ForCausalLM" if qwen3 else "LlamaForCausalLM"],
        "model_type": "qwen3" if qwen3 else "llama",
        "hidden_size": hidden,
        "intermediate_size": intermediate or 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "max_position_embeddings": max_context,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": tie,
        "attention_bias": bias,
        "mlp_bias": bias,
        "bos_token_id": vocab - 2,
        "eos_token_id": vocab - 1,
        "pad_token_id": vocab - 1,
        "torch_dtype": str(dtype).removeprefix("torch."),
    } | (config or {})
    _write_json(folder / "config.json", values)
    _write_json(
        folder / "generation_config.json", {"bos_token_id": vocab - 2, "eos_token_id": end_ids, "pad_token_id": vocab - 1}
    )
    _write_weights(folder, _random_weights(values, seed, dtype), shards)
    return folder


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def _write_tokenizer(folder: Path, vocab_size: int, max_context: int, chat_template: bool) -> None:
    letters = "etaoinshrdlucmfwygpbvkqjxz"
    pairs = dict.fromkeys(COMMON_PAIRS + ["".join(pair) for pair in product(letters, letters)])
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    num_pairs = vocab_size - len(alphabet) - 2
    if not 0 <= num_pairs <= len(pairs):
        raise ValueError(f"vocab must be in [{len(alphabet) + 2}, {len(alphabet) + 2 + len(pairs)}], got {vocab_size}")
    merges = list(pairs)[:num_pairs]
    vocab = {text: i for i, text in enumerate(alphabet + merges)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[(pair[0], pair[1]) for pair in merges]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(BOS, special=True), AddedToken(EOS, special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": EOS,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_context,
    }
    _write_json(folder / "tokenizer_config.json", settings | ({"chat_template": CHAT_TEMPLATE} if chat_template else {}))


def _random_weights(config: dict[str, Any], seed: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Each projection keeps unit variance, so layers matter as much as the embedding; logits deviate by about 4 (tied: 1.5)."""
    generator = torch.Generator().manual_seed(seed)
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q_size, kv_size = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    weights: dict[str, torch.Tensor] = {}

    def normal(name: str, *shape: int, deviation: float) -> None:
        weights[name] = (torch.randn(*shape, generator=generator) * deviation).to(dtype)

    def linear(name: str, out_size: int, in_size: int, *, bias: bool, gain: float = 1.0) -> None:
        normal(f"{name}.weight", out_size, in_size, deviation=gain * in_size**-0.5)
        if bias:
            normal(f"{name}.bias", out_size, deviation=0.1)

    def norm(name: str, size: int = hidden) -> None:
        weights[f"{name}.weight"] = (1 + 0.1 * torch.randn(size, generator=generator)).to(dtype)

    # A tied embedding must be small beside the layers' output, or every token predicts itself.
    tied = config["tie_word_embeddings"]
    normal("model.embed_tokens.weight", config["vocab_size"], hidden, deviation=1.5 * hidden**-0.5 if tied else 1.0)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        norm(f"{prefix}.input_layernorm")
        norm(f"{prefix}.post_attention_layernorm")
        for name, out_size in (("q_proj", q_size), ("k_proj", kv_size), ("v_proj", kv_size)):
            linear(f"{prefix}.self_attn.{name}", out_size, hidden, bias=config["attention_bias"], gain=1.5)
        if config["model_type"] == "qwen3":
            norm(f"{prefix}.self_attn.q_norm", head_dim)
            norm(f"{prefix}.self_attn.k_norm", head_dim)
        linear(f"{prefix}.self_attn.o_proj", hidden, q_size, bias=config["attention_bias"], gain=2.0)
        for name in ("gate_proj", "up_proj"):
            linear(f"{prefix}.mlp.{name}", inner, hidden, bias=config["mlp_bias"], gain=1.5)
        linear(f"{prefix}.mlp.down_proj", hidden, inner, bias=config["mlp_bias"])
    norm("model.norm")
    if not tied:
        normal("lm_head.weight", config["vocab_size"], hidden, deviation=4.0 * hidden**-0.5)
    return weights


def _write_weights(folder: Path, weights: dict[str, torch.Tensor], shards: int) -> None:
    if shards == 1:
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names = list(weights)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = names[shard::shards]
        save_file({name: weights[name] for name in part}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total = sum(weight.numel() * weight.element_size() for weight in weights.values())
    _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})
