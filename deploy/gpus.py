"""How many GPUs a process of ours would see, without importing torch, which takes seconds."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

DRIVER = Path("/proc/driver/nvidia/gpus")
"""One folder per card, where the driver is loaded."""


def count_gpus(*, env: Mapping[str, str] = os.environ, list_gpus: Callable[[], int] | None = None) -> int:
    """Those that CUDA_VISIBLE_DEVICES leaves of those that are here."""
    here = (list_gpus or _list_gpus)()
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return here
    named = 0
    for name in (part.strip() for part in visible.split(",")):
        # CUDA stops reading at the first that is none: that is how -1 hides all.
        if not name or name.startswith("-") or (name.isdigit() and int(name) >= here):
            break
        named += 1
    return min(named, here)


def _list_gpus() -> int:
    if shutil.which("nvidia-smi") is not None:
        try:
            listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False, timeout=30)
        except subprocess.TimeoutExpired:
            return 0
        if listed.returncode == 0:
            return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
    return sum(1 for _ in DRIVER.iterdir()) if DRIVER.is_dir() else 0
