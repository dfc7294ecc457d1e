"""Model folders without weights, for the text side: byte-level BPE, sentencepiece with byte fallback, whole words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from common.model_dir import ModelDir

SPECIAL = ("<|start|>", "<|end|>")
SAMPLE = [
    "The capital of France is Paris, the capital of Italy is Rome.",
    "Straße, naïve café, 東京は日本の首都です。 Привет, мир! 😀 👩‍👩‍👧 🇫🇷",
    "def main():\n    print('hello,  world')\n\n",
] * 3


def write_model(folder: Path, tokenizer: Tokenizer, *, vocab_size: int | None = None, **files: dict[str, Any] | str) -> ModelDir:
    """files: by stem, e.g. tokenizer_config={...} for tokenizer_config.json, chat_template="..." for chat_template.jinja."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocab_size or tokenizer.get_vocab_size(),
        "max_position_embeddings": 256,
    }
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer.save(str(folder / "tokenizer.json"))
    for stem, content in files.items():
        if isinstance(content, str):
            (folder / f"{stem}.jinja").write_text(content)
        else:
            (folder / f"{stem}.json").write_text(json.dumps(content))
    return ModelDir.open(folder, need_weights=False)


def byte_level() -> Tokenizer:
    """As GPT-2, Llama 3, SmolLM: every byte has a token, merges may cut characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(SAMPLE, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False))
    _add(tokenizer)
    return tokenizer


def byte_fallback(*, strip: bool = True) -> Tokenizer:
    """As Llama 2 (strip) and Gemma (no strip): characters it lacks become byte tokens."""
    words = ["▁", "▁the", "▁cap", "ital", "a", "b", "é", "東", "▁▁", "<0xZZ>"]
    vocab = {"<unk>": 0} | {f"<0x{byte:02X}>": 1 + byte for byte in range(256)} | {word: 257 + i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    _add(tokenizer)
    return tokenizer


def words(decoder: Any = None) -> Tokenizer:
    """Whole words; without a decoder the text is the words with spaces between."""
    tokenizer = Tokenizer(
        models.WordLevel({"[UNK]": 0, "one": 1, "two": 2, "##three": 3, ".": 4, "é": 5, "▁six": 6, "7</w>": 7}, "[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if decoder is not None:
        tokenizer.decoder = decoder
    _add(tokenizer)
    return tokenizer


def _add(tokenizer: Tokenizer) -> None:
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken("<plain é added>", normalized=False)])
