"""What the answer should be: the same model in one process, by transformers, float32."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch


@lru_cache(maxsize=8)
def load(model: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()


@lru_cache(maxsize=1024)
def _greedy(model: Path, prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    network = load(model)
    with torch.inference_mode():
        past, ids, output = None, torch.tensor([prompt]), list[int]()
        for _ in range(count):
            result = network(ids, past_key_values=past, use_cache=True, logits_to_keep=1)
            past = result.past_key_values
            output.append(int(result.logits[0, -1].argmax()))
            ids = torch.tensor([[output[-1]]])
    return tuple(output)


def greedy(model: Path, prompt: Sequence[int], count: int) -> list[int]:
    """The next `count` greedy tokens after prompt, ends ignored."""
    return list(_greedy(model, tuple(prompt), count))


def logits(model: Path, ids: Sequence[int]) -> torch.Tensor:
    """[len(ids), vocab] float32: the logits after each token."""
    with torch.inference_mode():
        result: torch.Tensor = load(model)(torch.tensor([list(ids)])).logits[0]
    return result


def best(model: Path, prompt: Sequence[int], output: Sequence[int]) -> list[int]:
    """For each token of output the most likely one after what precedes it. Equal to output, that is, by induction, the greedy
    continuation: in one forward pass."""
    chosen: list[int] = logits(model, [*prompt, *output])[len(prompt) - 1 : -1].argmax(-1).tolist()
    return chosen
