"""Simulated clusters and what they must answer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.core import SamplingParams
from common.engine.sim.tokens import SimVocabulary, expected_output
from common.model_dir import ModelDir
from tests.helpers.client import Answer

SIM = ("--engine", "sim")
FAST = (*SIM, "--time-scale", "20")


def vocabulary(model: Path) -> SimVocabulary:
    folder = ModelDir.open(model, need_weights=False)
    return SimVocabulary(folder.vocab_size, frozenset(folder.eos_token_ids))


def assert_expected(answer: Answer, prompt: Sequence[int], count: int, *, model: Path, **sampling: Any) -> None:
    """Every completion is what simulated workers must say."""
    params = SamplingParams(**sampling)
    for which, completion in answer.completions.items():
        expected = expected_output(prompt, count, vocabulary=vocabulary(model), params=params, completion=which)
        assert completion.ids == expected, f"completion {which} of {len(prompt)} tokens"
