"""Which attention kernel serves a model on a card.

phase     auto                                        otherwise
prefill   FlashInfer FA3 on Hopper                    FlashInfer FA2
decode    our FlashDecoding where it serves            XQA; FlashInfer's decode wrapper (FA2), which needs a plan by the CPU each
          the geometry                                step

FlashDecoding and XQA read block tables and lengths from the device, so a captured step needs nothing from the CPU.
"""

from __future__ import annotations

import torch

from common.engine.cuda import flash_decoding
from common.engine.cuda.attention_kernels import (
    DecodeKernel,
    FlashInferDecode,
    FlashInferPrefill,
    Geometry,
    PrefillKernel,
    XqaDecode,
)
from common.engine.cuda.attention_reference import TorchDecode, TorchPrefill
from common.engine.cuda.flash_decoding import FlashDecoding
from common.errors import StartError
from common.worker_config import DecodeAttention, PrefillAttention

WORKSPACE_BYTES = 256 << 20
XQA_CAPABILITIES = (9, 10, 12)
XQA_PAGE_SIZES = (16, 32, 64, 128)
XQA_HEAD_DIMS = (64, 128, 256)
XQA_MAX_GROUP = 32


def choose_decode(choice: DecodeAttention, geometry: Geometry, *, max_pages: int) -> DecodeKernel:
    """Raises StartError if what is asked for does not serve this geometry. max_pages: of all requests of a step together."""
    if choice == "torch" or geometry.dtype == torch.float32:
        return TorchDecode()
    obstacles = {"triton": flash_decoding.obstacle(geometry), "xqa": _xqa_obstacle(geometry)}
    if obstacle := obstacles.get(choice):
        raise StartError(f"--decode-attention {choice} {obstacle}")
    if choice == "triton" or choice == "auto" and not obstacles["triton"]:
        return FlashDecoding(geometry)
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=geometry.device)
    if choice == "flashinfer" or obstacles["xqa"]:
        return FlashInferDecode(geometry, workspace, max_pages=max_pages)
    return XqaDecode(geometry, workspace)


def choose_prefill(
    choice: PrefillAttention, geometry: Geometry, workspace: torch.Tensor, *, captured_reqs: int = 0, max_pages: int = 0
) -> PrefillKernel:
    """workspace: uint8, which all kernels of the phase may share. captured_reqs, max_pages: see FlashInferPrefill."""
    if choice == "torch" or geometry.dtype == torch.float32:
        return TorchPrefill()
    is_hopper = torch.cuda.get_device_capability(geometry.device)[0] == 9
    return FlashInferPrefill(
        geometry, workspace, backend="fa3" if is_hopper else "fa2", captured_reqs=captured_reqs, max_pages=max_pages
    )


def prefill_workspace(device: torch.device) -> torch.Tensor:
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def _xqa_obstacle(geometry: Geometry) -> str:
    """Why XQA does not serve this geometry; empty if it does."""
    capability = torch.cuda.get_device_capability(geometry.device)[0]
    if capability not in XQA_CAPABILITIES:
        return f"needs compute capability 9, 10 or 12, got {capability}"
    if geometry.dtype not in (torch.bfloat16, torch.float16):
        return f"needs bfloat16 or float16, got {geometry.dtype}"
    if geometry.page_size not in XQA_PAGE_SIZES:
        return f"needs pages of {XQA_PAGE_SIZES} tokens, got {geometry.page_size}"
    if geometry.head_dim not in XQA_HEAD_DIMS or geometry.group > XQA_MAX_GROUP:
        return f"does not serve head_dim {geometry.head_dim} with {geometry.group} query heads per KV head"
    return ""
