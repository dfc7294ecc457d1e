"""A Llama whose next token is a function of the last one, known in advance: for counting, and for texts it must say exactly."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.helpers.tiny_model import make_tiny_model

VOCAB = 384
GAIN = 1.0
"""A unit vector of 384 dimensions has its one element at 384 ** 0.5 after RMSNorm: the winner leads by about 19.6 logits."""


def make_successor_model(folder: Path, next_of: Callable[[int], int], *, max_context: int = 4096) -> Path:
    """After token t the model says next_of(t), for every t in [0, VOCAB). Layers are there but add nothing."""
    make_tiny_model(folder, vocab=VOCAB, hidden=VOCAB, max_context=max_context)
    path = folder / "model.safetensors"
    weights = load_file(path)
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.zero_()
        elif "norm" in name:
            weight.fill_(1.0)
    weights["model.embed_tokens.weight"] = torch.eye(VOCAB)
    head = torch.zeros(VOCAB, VOCAB)
    for token in range(VOCAB):
        head[next_of(token), token] = GAIN
    weights["lm_head.weight"] = head
    save_file(weights, path, metadata={"format": "pt"})
    return folder


def make_saying_model(folder: Path, text: str) -> Path:
    """Says `text` after its first character's first token, then ends; every token of text must be different."""
    from tokenizers import Tokenizer

    make_tiny_model(folder, vocab=VOCAB)
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    assert len(set(ids)) == len(ids), f"{text!r} repeats a token"
    after = dict(zip(ids, [*ids[1:], VOCAB - 1], strict=True))
    return make_successor_model(folder, lambda token: after.get(token, VOCAB - 1))
