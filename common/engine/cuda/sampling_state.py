"""What sampling needs to know of each slot, at addresses that never change, so that a captured graph can read it.

A request is recorded on the host (load) and travels with all others recorded since, in one copy (flush): headers first, then each
one's lists. Histories are kept only for requests with penalties, whose prompts then travel too.
"""

from __future__ import annotations

import struct
from collections.abc import Collection
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from common.core import Req, SamplingParams
from common.engine.cuda.jit import sampling_slots as kernels
from common.engine.cuda.launch import ceil_div, power_of_2_from
from common.engine.sampler import MIN_TEMPERATURE, is_deterministic

MAX_STOP_TOKENS = 64
MAX_BIAS = 1024
MAX_TOP = 20
"""As many of each as the router lets a request have (router/request/valid_request.py)."""

PARAMS = struct.Struct("<fiffQIiiifffiii")
"""A slot's 16 words on the device: temperature, top_k, top_p, min_p, seed, completion, output_index, min_tokens, logprobs (-1 for
none), repetition, frequency, presence, biases, stops, flags. Filters and penalties that are off have their neutral value."""
UPLOAD = struct.Struct(PARAMS.format + "iiii")
"""And of an upload: slot, where its lists begin, how many ids of prompt and of output they end with."""
HISTORY_BLOCK = 1024


class _Record(NamedTuple):
    """header: PARAMS, packed. lists: stops, bias ids, bias values, and then prompt and output for a history."""

    header: bytes
    lists: list[NDArray[np.int32]]
    num_prompt: int
    num_output: int


class SamplingState:
    """slots: as many rows of state, the last one a dummy's: it is never loaded and never changes. load, flush and set_mask are
    for one thread; flush and set_mask are ordered with the current stream's kernels and wait for nothing."""

    def __init__(self, slots: int, vocab_size: int, eos_token_ids: Collection[int], device: torch.device) -> None:
        self.vocab_size, self.device, self.dummy_slot = vocab_size, device, slots - 1
        self._eos_token_ids = sorted(eos_token_ids)
        self._records: dict[int, _Record] = {}
        self.params = self._zeros(slots, kernels.PARAMS.value)
        self.stops = self._zeros(slots, MAX_STOP_TOKENS + len(self._eos_token_ids))
        self.bias_ids = self._zeros(slots, MAX_BIAS)
        self.bias_values = self._zeros(slots, MAX_BIAS).view(torch.float32)
        # The last word says whether the mask is on, so that one copy sets both.
        self.mask = self._zeros(slots, ceil_div(vocab_size, 32) + 1)
        self.history = self._zeros(slots, vocab_size)

    def load(self, slot: int, req: Req, completion: int) -> None:
        """The slot's next token is this request's, whatever it was before; a grammar's mask is off. Nothing is uploaded yet."""
        assert 0 <= slot < self.dummy_slot, f"slot {slot} of {self.dummy_slot}"
        params = req.sampling_params
        stops = self._stops(req)
        assert len(stops) <= self.stops.shape[1] and len(params.logit_bias) <= MAX_BIAS
        lists = [
            np.array(stops, dtype=np.int32),
            np.array(list(params.logit_bias), dtype=np.int32),
            np.array(list(params.logit_bias.values()), dtype=np.float32).view(np.int32),
        ]
        if params.has_penalties:
            lists.append(req.input_ids.numpy())
        header = self._header(req, completion, num_stops=len(stops))
        kept = (req.prompt_len, req.num_output) if params.has_penalties else (0, 0)
        self._records[slot] = _Record(header, lists, *kept)

    def flush(self) -> None:
        """Uploads what was recorded since: one copy, at most three kernels."""
        if not self._records:
            return
        upload = self._upload(self._packed())
        count = len(self._records)
        kernels.load_slots_kernel[(count,)](
            upload, self.params, self.stops, self.bias_ids, self.bias_values, self.mask, self.mask.stride(0),
            STOPS=self.stops.shape[1], BIASES=MAX_BIAS, STOP_BLOCK=power_of_2_from(self.stops.shape[1]), BIAS_BLOCK=MAX_BIAS,
        )  # fmt: skip
        if ids := max(record.num_prompt + record.num_output for record in self._records.values()):
            blocks = ceil_div(self.vocab_size, HISTORY_BLOCK)
            kernels.clear_history_kernel[(blocks, count)](upload, self.history, self.vocab_size, BLOCK=HISTORY_BLOCK)
            blocks = ceil_div(ids, HISTORY_BLOCK)
            kernels.count_history_kernel[(blocks, count)](upload, self.history, self.vocab_size, BLOCK=HISTORY_BLOCK)
        self._records.clear()

    def set_mask(self, slot: int, words: NDArray[np.int32] | None) -> None:
        """A grammar's mask for the slot's next tokens, until another one: token i is allowed if bit i % 32 of word i // 32 is
        set. None takes it off. The slot's request has been flushed before."""
        if words is None:
            self.mask[slot, -1].zero_()
            return
        assert len(words) == self.mask.shape[1] - 1, f"{len(words)} words for a vocabulary of {self.vocab_size}"
        host = torch.empty(self.mask.shape[1], dtype=torch.int32, pin_memory=self.device.type == "cuda")
        host[:-1] = torch.from_numpy(words)
        host[-1] = 1
        self.mask[slot].copy_(host, non_blocking=True)

    def _header(self, req: Req, completion: int, *, num_stops: int) -> bytes:
        params = req.sampling_params
        assert params.seed is not None or is_deterministic(params), "the router draws a seed where none is given"
        top_k = params.top_k if 0 < params.top_k < self.vocab_size else 0
        logprobs = -1 if req.logprobs is None else min(req.logprobs, self.vocab_size, MAX_TOP)
        return PARAMS.pack(
            max(params.temperature, MIN_TEMPERATURE), top_k, params.top_p, params.min_p, params.seed or 0,
            completion, req.num_output, params.min_tokens, logprobs,
            params.repetition_penalty, params.frequency_penalty, params.presence_penalty,
            len(params.logit_bias), num_stops, flags_of(params, top_k),
        )  # fmt: skip

    def _stops(self, req: Req) -> list[int]:
        """The tokens that would end the output, if min_tokens masks them at all."""
        params = req.sampling_params
        if req.num_output >= params.min_tokens:
            return []
        return [*params.stop_token_ids, *(() if params.ignore_eos else self._eos_token_ids)]

    def _packed(self) -> NDArray[np.int32]:
        """All records as one upload."""
        tail = len(self._records) * kernels.HEADER.value
        headers = bytearray()
        for slot, record in self._records.items():
            headers += record.header + struct.pack("<iiii", slot, tail, record.num_prompt, record.num_output)
            tail += sum(map(len, record.lists))
        lists = [part for record in self._records.values() for part in record.lists]
        return np.concatenate([np.frombuffer(headers, dtype=np.int32), *lists])

    def _upload(self, words: NDArray[np.int32]) -> torch.Tensor:
        """On the device. torch's pinned memory is not given out again before the copy has been made."""
        host = torch.empty(len(words), dtype=torch.int32, pin_memory=self.device.type == "cuda")
        host.numpy()[:] = words
        return host.to(self.device, non_blocking=True)

    def _zeros(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=self.device)


def flags_of(params: SamplingParams, top_k: int) -> int:
    """FLAGS of the kernels. top_k: 0 if it filters nothing."""
    flags = kernels.DETERMINISTIC.value if is_deterministic(params) else 0
    if top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0:
        flags |= kernels.FILTERED.value
    if params.has_penalties:
        flags |= kernels.PENALIZED.value
    return flags
