"""Follows one request's length fields through prefill and two decode steps: python examples/req_lengths.py"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from common.core import Req, SamplingParams


def main() -> None:
    prompt = torch.arange(6, dtype=torch.int32)
    req = Req(
        prompt, table_idx=0, cached_len=2, output_len=3, uid=0, sampling_params=SamplingParams(max_tokens=3), cache_handle=None
    )
    show(req, "at admission (2 hit)")
    for stage in ("after prefill", "after decode 1", "after decode 2"):
        req.complete_one()
        req.append_host(torch.tensor([100], dtype=torch.int32))
        show(req, stage)
    print("final input_ids:", req.input_ids.tolist())


def show(req: Req, stage: str) -> None:
    lengths = ("cached_len", "device_len", "extend_len", "remain_len", "can_decode")
    print(f"{stage:<18} " + "  ".join(f"{name}={getattr(req, name)}" for name in lengths))


if __name__ == "__main__":
    main()
