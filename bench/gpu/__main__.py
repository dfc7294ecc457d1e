"""Benchmarks of the GPU data plane, one table per line, beside the ceilings measured in the same run.

python -m bench.gpu [--only decode prefill] [--model llama-3-8b qwen3-0.6b] [--out bench/out/gpu.json]
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

from bench.gpu import ceilings
from bench.gpu.decode import BATCH_SIZES, decode_rows
from bench.gpu.engine import load
from bench.gpu.prefill import prefill_rows
from bench.gpu.table import Row, save, show
from common.core import reset_global_ctx

LINES = {"decode": decode_rows, "prefill": prefill_rows}
POOL_PAGES = 256 * 25 + 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=LINES, default=list(LINES))
    parser.add_argument("--model", nargs="+", default=["Qwen3-0.6B", "Llama-3-8B"])
    parser.add_argument("--out", type=Path, default=Path("bench/out/gpu.json"))
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench.gpu needs a GPU, and there is none here")
    torch.cuda.set_stream(torch.cuda.Stream())
    measured = ceilings.measure()
    print(f"{torch.cuda.get_device_name()}: {measured}", flush=True)
    results: dict[str, list[Row]] = {}
    for name in args.model:
        start = time.perf_counter()
        engine = load(name, graph_sizes=BATCH_SIZES, max_context=8192, pool_pages=POOL_PAGES, chunk_tokens=8192)
        print(f"{name} ready in {time.perf_counter() - start:.1f} s", flush=True)
        for line in args.only:
            rows: list[Row] = [*LINES[line](engine, measured)]
            show(f"{line}, {name}", rows)
            results[f"{line} {name}"] = rows
        del engine
        reset_global_ctx()
        torch.cuda.empty_cache()
    save(args.out, results)


if __name__ == "__main__":
    main()
