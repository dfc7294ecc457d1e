"""PrefillGraphs: short prefill steps as captured CUDA graphs, for which launching kernel by kernel takes longer than computing.

A step is padded to a captured shape: so many tokens, so many requests. A padding token has location -1, which nothing is stored
at; a padding request has no token, and its row of logits is token 0's, which nobody reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch

from common.core import Batch, Req
from common.engine.cuda.attention_kernels import PrefillKernel
from common.engine.cuda.capture import capture, uncollected
from common.engine.cuda.inputs import PrefillInputs
from common.engine.peer_store import PeerStore


class Shape(NamedTuple):
    """What a step is padded to. Ordered by tokens, so that the first that holds a step is the closest."""

    tokens: int
    reqs: int


class _Captured(NamedTuple):
    """inputs: the packed inputs' fixed place. logits: [reqs, vocab_size]. replay: the layers."""

    inputs: torch.Tensor
    kernel: PrefillKernel
    logits: torch.Tensor
    replay: Callable[[], None]


class PrefillGraphs:
    """Engine thread only."""

    def __init__(
        self,
        forward: Callable[[Batch, PrefillKernel], torch.Tensor],
        inputs: PrefillInputs,
        *,
        make_kernel: Callable[[Shape], PrefillKernel],
        shapes: list[Shape],
    ) -> None:
        """forward: the layers of a batch whose fields are filled, attending with that kernel. make_kernel: one whose run may be
        captured at this shape and replayed after another plan."""
        self._inputs = inputs
        self._captured: dict[Shape, _Captured] = {}
        pool = torch.cuda.graph_pool_handle()
        with torch.inference_mode(), uncollected():
            for shape in sorted(shapes, reverse=True):
                self._captured[shape] = self._capture(shape, forward, make_kernel(shape), pool)
        self._shapes = sorted(shapes)

    def shape_of(self, batch: Batch) -> Shape | None:
        """The captured shape that holds the step; None if it is too long or has too many requests."""
        tokens = sum(req.extend_len for req in batch.reqs)
        return next((shape for shape in self._shapes if tokens <= shape.tokens and batch.size <= shape.reqs), None)

    def launch(self, shape: Shape, batch: Batch, stores: Mapping[Req, PeerStore]) -> torch.Tensor:
        """[requests with is_last_chunk and then padding, vocab_size] logits, valid until the next launch."""
        captured = self._captured[shape]
        packed, spans = self._inputs.pack(batch.reqs, stores, tokens=shape.tokens, rows=shape.reqs)
        captured.inputs.copy_(self._inputs.upload(packed))
        captured.kernel.plan(spans)
        captured.replay()
        return captured.logits

    def _capture(
        self, shape: Shape, forward: Callable[[Batch, PrefillKernel], torch.Tensor], kernel: PrefillKernel, pool: Any
    ) -> _Captured:
        packed, spans = self._inputs.pack_nothing(shape.tokens, shape.reqs)
        inputs = self._inputs.upload(packed).clone()
        batch = Batch([], "prefill")
        batch.padded_reqs = []
        self._inputs.fill(batch, inputs, tokens=shape.tokens, rows=shape.reqs)
        kernel.plan(spans)
        forward(batch, kernel)
        torch.cuda.synchronize()
        logits, replay = capture(partial(forward, batch, kernel), pool)
        return _Captured(inputs, kernel, logits, replay)
