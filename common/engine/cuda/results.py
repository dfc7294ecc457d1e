"""ResultRing: sampled tokens on their way to the host while the device goes on."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from common.core import Req
from common.engine.cuda.sampling import DeviceSampler, Level
from common.engine.sampler import Sampled

SLOTS = 4
"""More than the steps that may be in the air at once (Runner.lookahead)."""


class ResultRing:
    """Engine thread only. What fetch gave is to be read before SLOTS more were fetched."""

    def __init__(self, sampler: DeviceSampler) -> None:
        self._sampler = sampler
        self._host = [torch.empty_like(sampler.output, device="cpu", pin_memory=True) for _ in range(SLOTS)]
        self._next = 0

    def fetch(self, reqs: Sequence[Req], level: Level) -> SampledTokens:
        """Copies what the sampler has just been launched for; its first rows are those of reqs. On the current stream."""
        host = self._host[self._next]
        self._next = (self._next + 1) % SLOTS
        on_device = self._sampler.results(len(reqs), level)
        on_host = host[: len(on_device)]
        on_host.copy_(on_device, non_blocking=True)
        return SampledTokens(self._sampler, on_host, reqs)


class SampledTokens:
    """A Pending of one token per request."""

    def __init__(self, sampler: DeviceSampler, on_host: torch.Tensor, reqs: Sequence[Req]) -> None:
        self._sampler = sampler
        self._on_host = on_host
        self._reqs = reqs
        self._copied = torch.cuda.Event()
        self._copied.record()

    def result(self) -> list[list[Sampled]]:
        self._copied.synchronize()
        return [[one] for one in self._sampler.to_sampled(self._on_host.numpy(), self._reqs)]
