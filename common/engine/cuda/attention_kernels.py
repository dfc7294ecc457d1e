"""The attention kernels behind CudaAttention. Which of them serves a model on a card: attention_choice.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import flashinfer
import flashinfer.decode
import numpy as np
import torch
from numpy.typing import NDArray

from common.engine.cuda.spans import PagedSpans, indptr


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
        """Causal: a request's query i sees its first kv_len - query_len + i + 1 tokens. Rows past those planned are padding.

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

    def __init__(
        self,
        geometry: Geometry,
        workspace: torch.Tensor,
        *,
        backend: Literal["fa3", "fa2"],
        captured_reqs: int = 0,
        max_pages: int = 0,
    ) -> None:
        """captured_reqs: requests of a step at most, if run is to be captured (0: it is not); the first plan then has the most
        tokens that will come. max_pages: of all requests of a captured step."""
        self._geometry = geometry
        self._captured_reqs = captured_reqs
        self._tokens = 0
        self._planned = torch.cuda.Event()
        buffers: dict[str, torch.Tensor] = {}
        if captured_reqs:
            starts = torch.zeros(2, captured_reqs + 1, dtype=torch.int32, device=geometry.device)
            buffers = {
                "qo_indptr_buf": starts[0],
                "paged_kv_indptr_buf": starts[1],
                "paged_kv_indices_buf": torch.zeros(max_pages, dtype=torch.int32, device=geometry.device),
                "paged_kv_last_page_len_buf": torch.ones(captured_reqs, dtype=torch.int32, device=geometry.device),
            }
        self._wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            workspace, "NHD", use_cuda_graph=captured_reqs > 0, backend=backend, **buffers
        )

    def plan(self, spans: PagedSpans) -> None:
        # The wrapper uploads from one pinned buffer: the last plan must have left it.
        self._planned.synchronize()
        self._tokens = int(spans.query_len.sum())
        geometry, padding = self._geometry, max(0, self._captured_reqs - len(spans.kv_len))
        kv_len = np.pad(spans.kv_len, (0, padding))
        self._wrapper.plan(
            torch.from_numpy(indptr(np.pad(spans.query_len, (0, padding)))),
            torch.from_numpy(np.pad(spans.page_indptr, (0, padding), mode="edge")),
            torch.from_numpy(spans.pages).to(geometry.device, non_blocking=True),
            torch.from_numpy(((kv_len - 1) % geometry.page_size + 1).astype(np.int32)),
            geometry.num_heads,
            geometry.num_kv_heads,
            geometry.head_dim,
            geometry.page_size,
            causal=True,
            q_data_type=geometry.dtype,
        )
        self._planned.record()

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> None:
        # FlashInfer refuses more rows than it has planned with.
        self._wrapper.run(q[: self._tokens], (k, v), out=out[: self._tokens])


class Unplanned:
    """What decode kernels have in common that read tables and lengths from the device."""

    needs_plan = False
    can_capture = True

    def plan(self, lengths: Sequence[int], pages: Sequence[NDArray[np.int32]]) -> None:
        """Nothing to do."""


class XqaDecode(Unplanned):
    """TensorRT-LLM's XQA kernel as FlashInfer ships it."""

    def __init__(self, geometry: Geometry, workspace: torch.Tensor) -> None:
        """workspace: uint8, zero at first use: its semaphores count from there."""
        self._scale = geometry.head_dim**-0.5
        self._workspace = workspace

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
    """FlashInfer's decode wrapper with tensor cores, for what our kernel and XQA do not serve. One wrapper per captured size."""

    needs_plan = True
    can_capture = True

    def __init__(self, geometry: Geometry, workspace: torch.Tensor, *, max_pages: int) -> None:
        """max_pages: of all requests of a step together."""
        self._geometry = geometry
        self._workspace = workspace
        self._planned = torch.cuda.Event()
        self._indices = torch.empty(max_pages, dtype=torch.int32, device=geometry.device)
        self._wrappers: dict[int, flashinfer.BatchDecodeWithPagedKVCacheWrapper] = {}

    def plan(self, lengths: Sequence[int], pages: Sequence[NDArray[np.int32]]) -> None:
        self._planned.synchronize()  # As in FlashInferPrefill.
        geometry = self._geometry
        kv_len = np.array(lengths, dtype=np.int32)
        self._wrapper(len(lengths)).plan(
            torch.from_numpy(indptr(np.array([len(own) for own in pages], dtype=np.int32))),
            torch.from_numpy(np.concatenate(pages)).to(geometry.device, non_blocking=True),
            torch.from_numpy(((kv_len - 1) % geometry.page_size + 1).astype(np.int32)),
            geometry.num_heads,
            geometry.num_kv_heads,
            geometry.head_dim,
            geometry.page_size,
            q_data_type=geometry.dtype,
        )
        self._planned.record()

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
