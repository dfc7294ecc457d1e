"""The attention kernels behind CudaAttention, and which of them serves a model on a card.

phase     auto                                        otherwise
prefill   FlashInfer FA3 on Hopper                    FlashInfer FA2
decode    XQA where it serves the geometry            FlashInfer's decode wrapper (FA2), which needs a plan by the CPU each step

XQA reads block tables and lengths from the device, so a captured step needs nothing from the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import flashinfer
import flashinfer.decode
import numpy as np
import torch
from numpy.typing import NDArray

from common.engine.cuda.attention_reference import TorchDecode, TorchPrefill
from common.engine.cuda.spans import PagedSpans
from common.errors import StartError
from common.worker_config import DecodeAttention, PrefillAttention

WORKSPACE_BYTES = 256 << 20
XQA_CAPABILITIES = (9, 10, 12)
XQA_PAGE_SIZES = (16, 32, 64, 128)
XQA_HEAD_DIMS = (64, 128, 256)
XQA_MAX_GROUP = 32


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """What a kernel is made for."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype
    device: torch.device

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads


class PrefillKernel(Protocol):
    def plan(self, spans: PagedSpans) -> None:
        """Once per step, before the first run. Host work and an upload; never in a capture."""

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
        """Causal: a request's query i sees its first kv_len - query_len + i + 1 tokens.

        q, out: [tokens, num_heads, head_dim]; k, v: [num_pages, page_size, num_kv_heads, head_dim], any stride between pages.
        """


class DecodeKernel(Protocol):
    def plan(self, lengths: Sequence[int], pages: Sequence[NDArray[np.int32]]) -> None:
        """Once per step, outside of the captured graph. lengths: [requests], tokens each attends to; pages: its pages."""

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """q, out: [requests, num_heads, head_dim]; k, v: as in PrefillKernel; block_tables: [requests, pages] int32 and
        seq_lens: [requests] int32 on the device."""

    needs_plan: bool
    """False: plan does nothing, and a captured run serves any lengths."""
    can_capture: bool
    """Whether run may be captured in a graph and replayed after another plan."""


class FlashInferPrefill:
    """FlashInfer's paged prefill: Ye et al., "FlashInfer", arXiv:2501.01005; FA3: Shah et al., arXiv:2407.08608."""

    def __init__(self, geometry: Geometry, workspace: torch.Tensor, *, backend: Literal["fa3", "fa2"]) -> None:
        self._geometry = geometry
        self._wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=backend)

    def plan(self, spans: PagedSpans) -> None:
        geometry = self._geometry
        last_page_len = (spans.kv_len - 1) % geometry.page_size + 1
        self._wrapper.plan(
            torch.from_numpy(_indptr(spans.query_len)),
            torch.from_numpy(spans.page_indptr),
            torch.from_numpy(spans.pages).to(geometry.device, non_blocking=True),
            torch.from_numpy(last_page_len.astype(np.int32)),
            geometry.num_heads,
            geometry.num_kv_heads,
            geometry.head_dim,
            geometry.page_size,
            causal=True,
            q_data_type=geometry.dtype,
        )

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
        self._wrapper.run(q, (k, v), out=out)


class XqaDecode:
    """TensorRT-LLM's XQA kernel as FlashInfer ships it."""

    needs_plan = False
    can_capture = True

    def __init__(self, geometry: Geometry, workspace: torch.Tensor) -> None:
        """workspace: uint8, zero at first use: its semaphores count from there."""
        self._scale = geometry.head_dim**-0.5
        self._workspace = workspace

    def plan(self, lengths: Sequence[int], pages: Sequence[NDArray[np.int32]]) -> None:
        """Nothing to do."""

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        flashinfer.decode.xqa_batch_decode_with_kv_cache(
            q,
            (k, v),
            self._workspace,
            block_tables,
            seq_lens.view(torch.uint32),
            block_tables.shape[1] * k.shape[1],
            bmm1_scale=self._scale,
            bmm2_scale=1.0,
            out=out,
        )


class FlashInferDecode:
    """FlashInfer's decode wrapper with tensor cores, for geometries that XQA does not serve. One wrapper per captured size."""

    needs_plan = True
    can_capture = True

    def __init__(self, geometry: Geometry, workspace: torch.Tensor, *, max_pages: int) -> None:
        """max_pages: of all requests of a step together."""
        self._geometry = geometry
        self._workspace = workspace
        self._indices = torch.empty(max_pages, dtype=torch.int32, device=geometry.device)
        self._wrappers: dict[int, flashinfer.BatchDecodeWithPagedKVCacheWrapper] = {}

    def plan(self, lengths: Sequence[int], pages: Sequence[NDArray[np.int32]]) -> None:
        geometry = self._geometry
        kv_len = np.array(lengths, dtype=np.int32)
        self._wrapper(len(lengths)).plan(
            torch.from_numpy(_indptr(np.array([len(own) for own in pages], dtype=np.int32))),
            torch.from_numpy(np.concatenate(pages)).to(geometry.device, non_blocking=True),
            torch.from_numpy(((kv_len - 1) % geometry.page_size + 1).astype(np.int32)),
            geometry.num_heads,
            geometry.num_kv_heads,
            geometry.head_dim,
            geometry.page_size,
            q_data_type=geometry.dtype,
        )

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        self._wrapper(len(q)).run(q, (k, v), out=out)

    def _wrapper(self, size: int) -> flashinfer.BatchDecodeWithPagedKVCacheWrapper:
        if size not in self._wrappers:
            device = self._geometry.device
            self._wrappers[size] = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                self._workspace,
                "NHD",
                use_cuda_graph=True,
                use_tensor_cores=True,
                paged_kv_indptr_buffer=torch.zeros(size + 1, dtype=torch.int32, device=device),
                paged_kv_indices_buffer=self._indices,
                paged_kv_last_page_len_buffer=torch.ones(size, dtype=torch.int32, device=device),
            )
        return self._wrappers[size]


def choose_decode(choice: DecodeAttention, geometry: Geometry, *, max_pages: int) -> DecodeKernel:
    """Raises StartError if what is asked for does not serve this geometry. max_pages: of all requests of a step together."""
    if choice == "torch" or geometry.dtype == torch.float32:
        return TorchDecode()
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=geometry.device)
    obstacle = _xqa_obstacle(geometry)
    if choice == "xqa" and obstacle:
        raise StartError(f"--decode-attention xqa {obstacle}")
    if choice == "flashinfer" or obstacle:
        return FlashInferDecode(geometry, workspace, max_pages=max_pages)
    return XqaDecode(geometry, workspace)


def choose_prefill(choice: PrefillAttention, geometry: Geometry) -> PrefillKernel:
    if choice == "torch" or geometry.dtype == torch.float32:
        return TorchPrefill()
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=geometry.device)
    is_hopper = torch.cuda.get_device_capability(geometry.device)[0] == 9
    return FlashInferPrefill(geometry, workspace, backend="fa3" if is_hopper else "fa2")


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


def _indptr(counts: NDArray[np.int32]) -> NDArray[np.int32]:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
