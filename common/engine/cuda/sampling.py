"""The sampler on the device: common/engine/sampler.py's order of steps and its draws, as kernels that a graph can hold.

A step is launched at the cheapest level that serves its requests. Passes over a row's logits: GREEDY and RANDOM one; FILTERED one
more and, for rows with top_k or top_p, one to four for each; FULL another, and a copy, for rows with penalties, bias or a mask,
and one for rows with log-probabilities. What one row asks for costs the others no pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum

import numpy as np
import torch
from numpy.typing import NDArray

from common.core import Req
from common.engine.cuda.jit import sampling_draw, sampling_logits, sampling_slots, sampling_threshold
from common.engine.cuda.launch import ceil_div, power_of_2_from
from common.engine.cuda.sampling_state import MAX_BIAS, MAX_TOP, SamplingState
from common.engine.runner import Sampled
from common.engine.sampler import is_deterministic

CHUNK = 4096
BLOCK = 4096
LAYERS = 16
"""How often a search may copy a token together with others from the same place in a block."""
SHARED_PASSES = {16: 6, 64: 4}
"""Up to so many rows, so many passes of a search are shared out; a launch for each, whether or not a row still needs it."""
ADVANCE_ROWS = 256
FIELDS: int = sampling_threshold.FIELDS.value


class Level(IntEnum):
    """What a launch can do; each serves all that the ones before it do. RANDOM: a temperature. FILTERED: also top_k, top_p and
    min_p. FULL: also penalties, bias, masks and log-probabilities."""

    GREEDY = 0
    RANDOM = 1
    FILTERED = 2
    FULL = 3


def level_of(reqs: Sequence[Req]) -> Level:
    """The cheapest that serves every request. A request with a grammar's mask takes FULL, which is for the caller to know."""
    return max(map(_level_of, reqs), default=Level.GREEDY)


def _level_of(req: Req) -> Level:
    params = req.sampling_params
    held = req.num_output < params.min_tokens and (not params.ignore_eos or len(params.stop_token_ids) > 0)
    if params.has_penalties or params.logit_bias or held or req.logprobs is not None:
        return Level.FULL
    if is_deterministic(params):
        return Level.GREEDY
    return Level.FILTERED if params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0 else Level.RANDOM


class DeviceSampler:
    """chunk, block: logits that a program handles at a time; powers of 2. shared_passes: see SHARED_PASSES, in rising order.

    output: [max_rows * (2 + 2 * MAX_TOP)] int32, all results at fixed addresses: max_rows tokens, then each row's log-probability
    of the token, MAX_TOP ids, MAX_TOP log-probabilities. tokens, logprob, top_ids and top_logprobs are views of it.
    """

    def __init__(
        self,
        state: SamplingState,
        max_rows: int,
        *,
        chunk: int = CHUNK,
        block: int = BLOCK,
        shared_passes: Mapping[int, int] = SHARED_PASSES,
    ) -> None:
        self.state, self.max_rows = state, max_rows
        self._chunk, self._block, self._shared_passes = chunk, block, dict(shared_passes)
        self._chunks = ceil_div(state.vocab_size, chunk)
        self.output = self._new(max_rows * (2 + 2 * MAX_TOP), torch.int32)
        self.tokens = self.output[:max_rows]
        details = self.output[max_rows:].view(max_rows, 1 + 2 * MAX_TOP)
        self.logprob = details[:, 0].view(torch.float32)
        self.top_ids, self.top_logprobs = details[:, 1 : 1 + MAX_TOP], details[:, 1 + MAX_TOP :].view(torch.float32)
        self._details = details
        self._part_max, self._part_sum = self._parts(torch.float32), self._parts(torch.float32)
        self._part_id, self._part_ties = self._parts(torch.int32), self._parts(torch.int32)
        self._part_top = self._new(max_rows * self._chunks * MAX_TOP, torch.int64)
        self._thresholds, self._quotas = self._new(max_rows, torch.float32), self._new(max_rows, torch.int32)
        self._brackets = self._new(2 * max_rows * FIELDS, torch.float32)
        self._sums = self._new(2 * max_rows * self._chunks * FIELDS, torch.float32)
        self._few = self._new(max_rows * LAYERS * block // 2, torch.float32)
        self._work = self._new(max_rows * state.vocab_size, torch.float32)
        self._processed = self._new(max_rows, torch.int32)

    def sample(self, logits: torch.Tensor, slots: torch.Tensor, level: Level) -> None:
        """Launches. logits: [rows, vocab_size] bf16, fp16 or float32, left as they are, rows contiguous; slots: [rows] int32, any
        number of them the dummy's, whose token is 0. Log-probabilities are written for rows that ask for them."""
        rows, state = len(slots), self.state
        assert logits.shape == (rows, state.vocab_size) and logits.stride(1) == 1 and rows <= self.max_rows
        full = level is Level.FULL
        if full:
            self._process(logits, slots)
        common = (logits, logits.stride(0), self._work, self._processed, slots, state.params)
        sizes = (state.dummy_slot, state.vocab_size)
        shape = {"CHUNK": self._chunk, "FULL": full, "num_warps": 8}
        greedy = level is Level.GREEDY
        sampling_draw.stats_kernel[(self._chunks, rows)](
            *common, self._part_max, self._part_id, self._part_sum, *sizes, GREEDY=greedy, **shape
        )
        chunks = power_of_2_from(self._chunks)
        if level >= Level.FILTERED:
            self._search(common, rows, full)
            sampling_draw.tally_kernel[(self._chunks, rows)](
                *common, self._part_max, self._thresholds, self._part_sum, self._part_ties, *sizes, CHUNKS=chunks, **shape
            )
        sampling_draw.pick_kernel[(rows,)](
            *common, self._part_max, self._part_id, self._part_sum, self._part_ties, self._thresholds, self._quotas, self.tokens,
            *sizes, self._chunks, CHUNKS=chunks, GREEDY=greedy, **shape,
        )  # fmt: skip
        if full:
            self._take_logprobs(logits, slots)

    def advance(self, slots: torch.Tensor) -> None:
        """Launches: the sampled tokens become their slots' last ones. slots: as in sample; a dummy's is left alone."""
        rows, state = len(slots), self.state
        sampling_slots.advance_kernel[(ceil_div(rows, ADVANCE_ROWS),)](
            slots, self.tokens, state.params, state.history, rows, state.dummy_slot, state.vocab_size, BLOCK=ADVANCE_ROWS
        )

    def results(self, rows: int, level: Level) -> torch.Tensor:
        """The part of output that a step has made, contiguous: to be copied to the host at once."""
        return self.output[: self.max_rows + rows * (1 + 2 * MAX_TOP) if level is Level.FULL else rows]

    def to_sampled(self, results: NDArray[np.int32], reqs: Sequence[Req]) -> list[Sampled]:
        """results: those of results(), on the host, for rows that begin with reqs."""
        tokens = results[: len(reqs)].tolist()
        return [
            self._sampled(results, row, token, req.logprobs) for row, (token, req) in enumerate(zip(tokens, reqs, strict=True))
        ]

    def _sampled(self, results: NDArray[np.int32], row: int, token: int, logprobs: int | None) -> Sampled:
        if logprobs is None:
            return Sampled(token)
        width = 1 + 2 * MAX_TOP
        details = results[self.max_rows + row * width : self.max_rows + (row + 1) * width]
        values, count = details.view(np.float32), min(logprobs, self.state.vocab_size, MAX_TOP)
        top = zip(details[1 : 1 + count].tolist(), values[1 + MAX_TOP : 1 + MAX_TOP + count].tolist(), strict=True)
        return Sampled(token, float(values[0]), tuple(top))

    def _search(self, common: tuple[object, ...], rows: int, full: bool) -> None:
        """The filters' thresholds. common: logits, stride, work, processed, slots, params."""
        state, chunks = self.state, power_of_2_from(self._chunks)
        passes = next((passes for most, passes in self._shared_passes.items() if rows <= most), 0)
        inputs = (*common, self._part_max, self._brackets, self._sums)
        for done in range(passes):
            sampling_threshold.narrow_kernel[(self._chunks, rows)](
                *inputs, done, self.max_rows, state.dummy_slot, state.vocab_size,
                CHUNK=self._chunk, CHUNKS=chunks, FULL=full, num_warps=8,
            )  # fmt: skip
        sampling_threshold.search_kernel[(rows,)](
            *inputs, self._few, self._thresholds, self._quotas, passes, self.max_rows, state.dummy_slot, self._chunks,
            VOCAB=state.vocab_size, CHUNKS=chunks, FULL=full, BLOCK=self._block, LANES=self._block // 2,
            LAYERS=LAYERS, num_warps=16,
        )  # fmt: skip

    def _process(self, logits: torch.Tensor, slots: torch.Tensor) -> None:
        state = self.state
        sampling_logits.process_kernel[(self._chunks, len(slots))](
            logits, logits.stride(0), self._work, self._processed, slots, state.params, state.history, state.mask,
            state.mask.stride(0), state.dummy_slot, state.vocab_size, CHUNK=self._chunk, num_warps=8,
        )  # fmt: skip
        stops = state.stops.shape[1]
        sampling_logits.edit_kernel[(len(slots),)](
            self._work, self._processed, slots, state.params, state.stops, state.bias_ids, state.bias_values, state.vocab_size,
            STOPS=stops, BIASES=MAX_BIAS, STOP_BLOCK=power_of_2_from(stops), BIAS_BLOCK=MAX_BIAS,
        )  # fmt: skip

    def _take_logprobs(self, logits: torch.Tensor, slots: torch.Tensor) -> None:
        """After the tokens have been picked, whose partial results are not needed any more."""
        inputs = (logits, logits.stride(0), slots, self.state.params, self._part_max, self._part_sum, self._part_top)
        sampling_logits.top_chunk_kernel[(self._chunks, len(slots))](
            *inputs, self.state.dummy_slot, self.state.vocab_size, CHUNK=self._chunk, TOP=MAX_TOP, num_warps=8
        )
        sampling_logits.top_row_kernel[(len(slots),)](
            *inputs, self.tokens, self._details, self.state.dummy_slot, self._chunks,
            CHUNKS=power_of_2_from(self._chunks), TOP=MAX_TOP, CANDIDATES=power_of_2_from(self._chunks * MAX_TOP),
        )  # fmt: skip

    def _parts(self, dtype: torch.dtype) -> torch.Tensor:
        return self._new(self.max_rows * self._chunks, dtype)

    def _new(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype, device=self.state.device)
