"""The bare engine on the CPU: decode and prefill of random weights in SmolLM2-135M's geometry, beside transformers.

    python -m bench.engine_cpu [--dtype float32 bfloat16] [--no-peer] [--context 128] [--repeat 5] [--cpu-time]

Every figure is the best of several repeats: the machine may be shared. --cpu-time measures one thread's processor time instead of
the wall clock's, which a busy machine changes much less.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from bench.geometries import GEOMETRIES, write_model
from common.core import Batch, Req, SamplingParams, reset_global_ctx
from common.engine.model_runner import EngineConfig, ModelRunner
from common.engine.pages import pages_for


class Clock:
    """Seconds, of the wall or of this thread's processor time."""

    read: Callable[[], float] = staticmethod(time.perf_counter)


clock = Clock()

PAGE_SIZE = 16
BATCH_SIZES = (1, 8)
PREFILL_TOKENS = 512
GEOMETRY = GEOMETRIES["SmolLM2-135M"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--no-peer", action="store_true", help="leave transformers out")
    parser.add_argument("--context", type=int, default=128, help="tokens in the cache when decoding starts")
    parser.add_argument("--steps", type=int, default=16, help="decode steps per repeat")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--cpu-time", action="store_true", help="one thread, and the processor time that it takes")
    options = parser.parse_args()
    if options.cpu_time:
        options.threads, clock.read = 1, time.thread_time
    torch.set_num_threads(options.threads)
    print(f"torch {torch.__version__}, {options.threads} threads, context {options.context}, best of {options.repeat}")
    print(f"{'dtype':9} {'engine':13} {'batch':>5} {'ms/step':>9} {'tokens/s':>9}")
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), "SmolLM2-135M", tokenizer=False)
        for dtype in options.dtype:
            measure("pdserve", dtype, ours(Path(folder), dtype, options))
            if not options.no_peer:
                measure("transformers", dtype, theirs(Path(folder), dtype, options))


def measure(engine: str, dtype: str, results: Iterator[tuple[str, int, float]]) -> None:
    """Prints a row per (label, tokens per step, seconds per step)."""
    for label, tokens, seconds in results:
        print(f"{dtype:9} {engine:13} {label:>5} {seconds * 1e3:9.2f} {tokens / seconds:9.1f}", flush=True)
    gc.collect()


def best(step: Callable[[], None], repeat: int) -> float:
    """Seconds of the quickest of several calls, after one to warm up."""
    step()
    times = []
    for _ in range(repeat):
        start = clock.read()
        step()
        times.append(clock.read() - start)
    return min(times)


def ours(folder: Path, dtype: str, options: argparse.Namespace) -> Iterator[tuple[str, int, float]]:
    """Through ModelRunner.run, sampling and the caller's book-keeping included."""
    longest = max(PREFILL_TOKENS, options.context + options.steps * (options.repeat + 1) + 1)
    pages_each = pages_for(longest, PAGE_SIZE)

    def load(*, rows: int, decodes: bool) -> ModelRunner:
        reset_global_ctx()
        pages = pages_each * rows
        config = EngineConfig(model=folder, dtype=dtype, load_format="dummy", pool_pages=pages, table_rows=rows, decodes=decodes)
        runner = ModelRunner.load(config)
        for row in range(rows):
            runner.page_table.assign(row, 0, range(row * pages_each, (row + 1) * pages_each))
        return runner

    def prompt(row: int, length: int) -> Req:
        ids = torch.randint(3, GEOMETRY["vocab_size"], (length,), dtype=torch.int32)
        return Req(ids, row, 0, longest - length, row, SamplingParams(ignore_eos=True), None)

    runner = load(rows=max(BATCH_SIZES), decodes=True)
    for size in BATCH_SIZES:
        reqs = [prompt(row, options.context) for row in range(size)]
        advance(runner, Batch(reqs, "prefill"))

        def decode(reqs: list[Req] = reqs) -> None:
            for _ in range(options.steps):
                advance(runner, Batch(reqs, "decode"))

        yield str(size), size, best(decode, options.repeat) / options.steps
    runner = load(rows=1, decodes=False)  # As a prefill worker has it.
    req = prompt(0, PREFILL_TOKENS)
    yield f"p{PREFILL_TOKENS}", PREFILL_TOKENS, best(lambda: run_once(runner, req), options.repeat)


def advance(runner: ModelRunner, batch: Batch) -> None:
    for req, (sampled,) in zip(batch.reqs, runner.run(batch), strict=True):
        req.complete_one()
        req.append_host(torch.tensor([sampled.token_id], dtype=torch.int32))


def run_once(runner: ModelRunner, req: Req) -> None:
    """A prefill whose result is dropped, so that it can be repeated."""
    runner.run(Batch([req], "prefill"))


def theirs(folder: Path, dtype: str, options: argparse.Namespace) -> Iterator[tuple[str, int, float]]:
    """transformers' generate, timed from its first token to its last; and one forward pass."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=getattr(torch, dtype)).eval()
    model.generation_config.eos_token_id = None
    with torch.inference_mode():
        for size in BATCH_SIZES:
            ids = torch.randint(3, GEOMETRY["vocab_size"], (size, options.context))
            yield str(size), size, min(time_of_step(model, ids, options.steps) for _ in range(options.repeat))
        ids = torch.randint(3, GEOMETRY["vocab_size"], (1, PREFILL_TOKENS))
        yield f"p{PREFILL_TOKENS}", PREFILL_TOKENS, best(lambda: model(ids, logits_to_keep=1), options.repeat)


def time_of_step(model: Any, ids: torch.Tensor, steps: int) -> float:
    """Mean seconds of a decode step of generate."""
    times: list[float] = []

    def note_time(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        times.append(clock.read())
        return torch.zeros(len(ids), dtype=torch.bool)

    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=steps + 1,
        do_sample=False,
        pad_token_id=0,
        stopping_criteria=[note_time],
    )
    return (times[-1] - times[0]) / steps


if __name__ == "__main__":
    main()
