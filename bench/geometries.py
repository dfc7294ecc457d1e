"""The shapes of the models that benchmarks are run with, as folders for `--load-format dummy`: random weights, nothing fetched.

python -m bench.geometries Qwen3-0.6B FOLDER [--max-context 40960]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

_LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "attention_bias": False}
_QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu", "attention_bias": False}

GEOMETRIES: dict[str, dict[str, Any]] = {
    "SmolLM2-135M": _LLAMA
    | {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "Qwen3-0.6B": _QWEN3
    | {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
    },
    "Llama-3-8B": _LLAMA
    | {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
    },
}
"""config.json by model, but for Llama-3-8B's context, which is as long as its successors'. Where the published one has a list of
end tokens, the folder's generation_config.json has it."""

END_TOKENS = {"Qwen3-0.6B": [151645, 151643], "Llama-3-8B": [128001, 128009]}


def write_model(folder: Path, name: str, *, max_context: int | None = None, tokenizer: bool = True) -> Path:
    """Writes config and generation config of that geometry; returns the folder.

    max_context: instead of the model's own, for prompts that it was not made for. tokenizer: also one of bytes, which is
    enough for a router: it has no text for the ids beyond."""
    folder.mkdir(parents=True, exist_ok=True)
    config = GEOMETRIES[name] | ({} if max_context is None else {"max_position_embeddings": max_context})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    ends = {"bos_token_id": config["bos_token_id"], "eos_token_id": END_TOKENS.get(name, config["eos_token_id"])}
    (folder / "generation_config.json").write_text(json.dumps(ends, indent=2) + "\n")
    if tokenizer:
        _bytes_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def _bytes_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={text: i for i, text in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=GEOMETRIES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--max-context", type=int, help="tokens; default: the model's")
    args = parser.parse_args()
    print(write_model(args.folder, args.name, max_context=args.max_context))


if __name__ == "__main__":
    main()
