"""What the GPU tests share: a device, and inputs that nobody has tuned anything to."""

import os
import random

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The GPU; or the CPU, where Triton's interpreter was asked for (TRITON_INTERPRET=1)."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device, and TRITON_INTERPRET=1 is not set")
    return torch.device("cuda")


@pytest.fixture(autouse=True)
def fresh_seed() -> None:
    """Another seed each time; a failing test prints it."""
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"torch.manual_seed({seed})")
    torch.manual_seed(seed)
