"""Prompts of given lengths, different from each other in every token that matters."""

from __future__ import annotations

import random

ORDINARY = 380
"""Token ids below this are ordinary in every test model's vocabulary."""


def prompt(length: int, *, seed: int = 0) -> list[int]:
    """length random ordinary tokens."""
    rng = random.Random(f"{length}/{seed}")
    return [rng.randrange(ORDINARY) for _ in range(length)]
