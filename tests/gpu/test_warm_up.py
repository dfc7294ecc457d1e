"""Whatever the first requests are like, no kernel is left to be compiled for them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.helpers.tiny_model import make_tiny_model

pytest.importorskip("flashinfer", reason="flashinfer is not installed")


@pytest.mark.parametrize("qwen3", [False, True])
def test_no_kernel_is_compiled_once_the_engine_is_there(device: torch.device, tmp_path: Path, qwen3: bool) -> None:
    if device.type != "cuda":
        pytest.skip("kernels are compiled for a GPU only")
    model = make_tiny_model(
        tmp_path,
        qwen3=qwen3,
        dtype=torch.bfloat16,
        max_context=4096,
        hidden=256,
        heads=8,
        kv_heads=2,
        head_dim=64,
        layers=2,
        vocab=700,
    )
    done = subprocess.run(
        [sys.executable, "-m", "tests.helpers.late_compiles", str(model)],
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == []
