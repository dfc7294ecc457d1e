"""Sampled tokens on their way to the host while the device goes on."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from common.core import Req
from common.engine.cuda.sampling import DeviceSampler, Level
from common.engine.runner import Sampled


def fetch(sampler: DeviceSampler, reqs: Sequence[Req], level: Level) -> SampledTokens:
    """Copies what the sampler has just been launched for; its first rows are those of reqs. On the current stream."""
    on_device = sampler.results(len(reqs), level)
    # A buffer of its own for each: how many are in the air is the callers' business. Torch keeps pinned memory for the next.
    on_host = torch.empty_like(on_device, device="cpu", pin_memory=True)
    on_host.copy_(on_device, non_blocking=True)
    return SampledTokens(sampler, on_host, reqs)


class SampledTokens:
    """A Pending of one token per request."""

    def __init__(self, sampler: DeviceSampler, on_host: torch.Tensor, reqs: Sequence[Req]) -> None:
        self._sampler = sampler
        self._on_host = on_host
        self._reqs = tuple(reqs)
        self._copied = torch.cuda.Event()
        self._copied.record()

    def tokens(self) -> dict[Req, int]:
        """Waits for them; result() may be asked for before or after."""
        self._copied.synchronize()
        return dict(zip(self._reqs, self._on_host[: len(self._reqs)].tolist(), strict=True))

    def result(self) -> list[list[Sampled]]:
        self._copied.synchronize()
        return [[one] for one in self._sampler.to_sampled(self._on_host.numpy(), self._reqs)]
