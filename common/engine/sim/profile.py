"""SimProfile: how long a simulated engine takes for a step and for a handoff (--sim-profile FILE).

Where the defaults come from is in docs/simulator.md.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from common.errors import StartError


@dataclass(frozen=True)
class SimProfile:
    """Seconds, all of them. The defaults are one H200 (SXM) and Llama-3-8B in bfloat16.

    A prefill step over chunks: base + tokens * per_token + pairs * per_pair, where a chunk [from, to) of a prompt has
    (to² - from²) / 2 pairs of a query and a key.
    A decode step over requests: base + requests * per_request + (sum of their contexts) * per_context_token.
    Handing over: handoff_base + pages * handoff_per_page from the moment a page is ready, one page after the other.

    pool_tokens: KV that the worker has room for, unless --pool-pages says otherwise.
    """

    prefill_base: float = 1.3e-3
    prefill_per_token: float = 23.1e-6
    prefill_per_pair: float = 1.04e-9
    decode_base: float = 4.94e-3
    decode_per_request: float = 11.0e-6
    decode_per_context_token: float = 30.9e-9
    handoff_base: float = 0.6e-3
    handoff_per_page: float = 0.0
    pool_tokens: int = 800_000

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, is_whole = getattr(self, field.name), field.name == "pool_tokens"
            if not isinstance(value, int if is_whole else int | float) or isinstance(value, bool) or not value >= 0:
                raise ValueError(f"{field.name} must be a {'whole ' if is_whole else ''}number and at least 0, got {value!r}")

    @classmethod
    def read(cls, path: Path | None) -> SimProfile:
        """None: the defaults. Raises StartError naming the file and what is wrong with it."""
        if path is None:
            return cls()
        try:
            values = json.loads(path.read_text())
        except OSError as error:
            raise StartError(f"cannot read {path}: {error.strerror}") from None
        except ValueError as error:
            raise StartError(f"{path} is not JSON: {error}") from None
        known = [field.name for field in dataclasses.fields(cls)]
        if not isinstance(values, dict) or (unknown := sorted(set(values) - set(known))):
            what = "an array or a value" if not isinstance(values, dict) else f"{', '.join(unknown)}"
            raise StartError(f"{path}: must be an object with some of {', '.join(known)}, got {what}")
        try:
            return cls(**values)
        except ValueError as error:
            raise StartError(f"{path}: {error}") from None

    def prefill_seconds(self, chunks: list[tuple[int, int]]) -> float:
        """chunks: (from, to) of each prompt computed in the step, in tokens."""
        tokens = sum(end - begin for begin, end in chunks)
        pairs = sum(end * end - begin * begin for begin, end in chunks) / 2
        return self.prefill_base + tokens * self.prefill_per_token + pairs * self.prefill_per_pair

    def decode_seconds(self, contexts: list[int]) -> float:
        """contexts: of each request of the step, in tokens."""
        return self.decode_base + len(contexts) * self.decode_per_request + sum(contexts) * self.decode_per_context_token

    def handoff_seconds(self, pages: int) -> float:
        return self.handoff_base + pages * self.handoff_per_page
