"""What the answer should be: the same model in one process, by transformers, float32."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from common.engine.philox import uniforms


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


TIE = 1e-4
"""Logits nearer to each other, and draws nearer to a boundary, are decided by the order in which float32 sums were taken."""


def best(model: Path, prompt: Sequence[int], output: Sequence[int]) -> list[int]:
    """For each token of output the most likely one after what precedes it, or itself where it ties with that one. Equal to
    output, that is, by induction, the greedy continuation: in one forward pass."""
    rows = logits(model, [*prompt, *output])[len(prompt) - 1 : -1]
    ties = [float(row.max() - row[token]) < TIE for row, token in zip(rows, output, strict=True)]
    return [token if ties[i] else int(rows[i].argmax()) for i, token in enumerate(output)]


def drawn(model: Path, prompt: Sequence[int], output: Sequence[int], *, seed: int) -> list[int]:
    """As best, of what is drawn with that seed at temperature 1 and no filter."""
    ends = logits(model, [*prompt, *output])[len(prompt) - 1 : -1].double().softmax(-1).cumsum(-1)
    chosen = []
    for i, (row, token) in enumerate(zip(ends, output, strict=True)):
        [at] = uniforms([(seed, 0, i)])
        low, high = float(row[token - 1]) if token else 0.0, float(row[token])
        chosen.append(token if low - TIE < at < high + TIE else int(torch.searchsorted(row, at, right=True)))
    return chosen
