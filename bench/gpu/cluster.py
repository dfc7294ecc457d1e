"""Lines 5, 6 and 7: whole clusters, through bench.serve. Each is a list of its command lines; the tables are its own.

The models have random weights. `two` says that a line needs two GPUs.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

BOTH = ("Qwen3-0.6B", "Llama-3-8B")
ONE_GPU = ("--prefill", "0", "--decode", "1")
SLOS = tuple(word for limit in (8, 10, 12, 15, 20, 30) for word in ("--sweep", f"gap:p99:{limit}ms"))


@dataclass(frozen=True)
class Line:
    title: str
    commands: tuple[tuple[str, ...], ...]
    two: bool = False

    def run(self, out: Path) -> int:
        """The worst exit code of its commands."""
        print(f"\n{self.title}", flush=True)
        codes = []
        for command in self.commands:
            line = (sys.executable, "-m", "bench.serve", *command, "--launch", "--device", "cuda", "--out", str(out))
            codes.append(subprocess.run(line, check=False).returncode)
        return max(codes)


INTERFERENCE = (
    "interference --model Llama-3-8B --streams 64 --input 1024 --output 4096 --prompt 4096 --prompt-output 2 --share 0.8"
    " --warmup 6 --seconds 12 --compare colocated"
)
GOODPUT = "goodput --model Llama-3-8B --input 2048 --output 256 --slo ttft:p90:400ms --compare colocated"
OFFLINE = "offline --requests 256 --input 100-1024 --output 100-1024 --temperature 0.6"

LINES = {
    5: Line(
        "5. Interference: 64 streams, prompts of 4096 tokens at 80 % of what the system takes",
        (tuple(INTERFERENCE.split()),),
        two=True,
    ),
    6: Line(
        "6. Goodput, 2048 in and 256 out, against two colocated workers",
        ((*GOODPUT.split(), *SLOS),),
        two=True,
    ),
    7: Line(
        "7. Offline: 256 requests, 100-1024 in and out, temperature 0.6, one GPU",
        tuple((*OFFLINE.split(), "--model", model, *ONE_GPU) for model in BOTH),
    ),
}
