"""What a token costs in the router's text path, in microseconds, without any RPC.

    python -m bench.router_text

One completion of English-like text per row, pushed one token at a time (a decode step) and eight at a time (a burst).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from common.work import TokenOut
from common.work_key import WorkKey
from router.text.text_stream import TextStream
from router.text.tokenizer import Tokenizer
from tests.helpers.text_models import SAMPLE, byte_fallback, byte_level, words, write_model

TOKENS = 20_000
CASES: dict[str, tuple[str, ...]] = {
    "no stop string": (),
    "1 stop string, rare": ("###",),
    "1 stop string, often begun": ("the end",),
    "4 stop strings": ("\n\nUser:", "<|im_end|>", "Observation:", "###"),
    "16 stop strings": tuple(f"{chr(ord('a') + i)}zzz" for i in range(16)),
}


def us_per_token(tokenizer: Tokenizer, tokens: Sequence[TokenOut], stop: tuple[str, ...], size: int) -> float:
    """The best of three runs over all tokens."""
    chunks = [tokens[i : i + size] for i in range(0, len(tokens), size)]
    best = float("inf")
    for _ in range(3):
        stream = TextStream(tokenizer, stop=stop)
        started = time.perf_counter()
        for chunk in chunks:
            stream.push(chunk)
        best = min(best, time.perf_counter() - started)
    return best / len(tokens) * 1e6


def main() -> None:
    write = sys.stdout.write
    with TemporaryDirectory() as folder:
        made = {"byte level": byte_level(), "byte fallback": byte_fallback(), "general (whole words)": words()}
        for name, tokenizer in made.items():
            model = Tokenizer(write_model(Path(folder) / name, tokenizer))
            text = "one two " * 40 if name.startswith("general") else " ".join(SAMPLE)
            ids = model.encode(text)
            tokens = [TokenOut(WorkKey(1, 1, 1), i, ids[i % len(ids)]) for i in range(TOKENS)]
            for case, stop in CASES.items():
                times = [us_per_token(model, tokens, stop, size) for size in (1, 8)]
                write(f"{name:24}{case:28}{times[0]:8.2f} us/token one by one {times[1]:8.2f} by eight\n")


if __name__ == "__main__":
    main()
