"""Benchmarks of the GPU data plane, one table per line, beside the ceilings measured in the same run.

    python -m bench.gpu [--only 1,3,4] [--out bench/out/gpu]

1 the decode step alone   2 the whole decode worker   3 prefill   4 handoff   5 interference   6 goodput   7 offline
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

MODELS = ("Qwen3-0.6B", "Llama-3-8B")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="1,2,3,4,5,6,7", help="lines, with commas between")
    parser.add_argument("--model", nargs="+", default=list(MODELS), choices=MODELS, help="of lines 1 and 3")
    parser.add_argument("--out", type=Path, default=Path("bench/out/gpu"))
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("skipped: torch sees no GPU here")
        return 0
    # Imported now: what it needs is on machines with a GPU only.
    from bench.gpu.lines import run

    return run(sorted(int(line) for line in args.only.split(",")), models=args.model, out=args.out)


if __name__ == "__main__":
    raise SystemExit(main())
