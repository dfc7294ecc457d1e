"""What is wrong with an answer, by the API's own definitions and the logits that transformers has for its tokens.

The answer's tokens are given, so that one forward pass yields all logits: each token must be what the rules make of those before
it. Tolerances are for float32 sums in another order, which at a threshold or a boundary of the draw may decide otherwise.
"""

from __future__ import annotations

import codecs
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from transformers.convert_slow_tokenizer import bytes_to_unicode

from common.core import SamplingParams
from common.engine.philox import uniforms
from common.rpc.gen.pdserve.v1 import generation_pb2 as pb
from common.wire import sampling_from_pb
from tests.helpers import reference
from tests.helpers.client import Completion

LOGIT = 1e-3
DRAW = 3e-3
COLD = 0.1
"""Below this temperature a small difference of logits is a large one of weights: the token must be the best one, or nearly."""


class Judge:
    """Of answers of a tiny model (tests/helpers/tiny_model.py)."""

    def __init__(self, model: Path) -> None:
        self._model = model
        self._ends = set(json.loads((model / "generation_config.json").read_text())["eos_token_id"])
        tokenizer = json.loads((model / "tokenizer.json").read_text())
        byte_of = {char: byte for byte, char in bytes_to_unicode().items()}
        self._special = {token["id"]: token["content"].encode() for token in tokenizer["added_tokens"]}
        self._bytes = {token_id: bytes(byte_of[char] for char in text) for text, token_id in tokenizer["model"]["vocab"].items()}

    def faults(self, request: pb.GenerateRequest, number: int, completion: Completion) -> list[str]:
        """number: which of the n. In words; empty for a right answer."""
        ids, params = completion.ids, sampling_from_pb(request.sampling)
        prompt = list(request.token_ids.ids)
        if not 0 < len(ids) <= params.max_tokens:
            return [f"{len(ids)} tokens of {params.max_tokens}"]
        ends = set(params.stop_token_ids) | (set() if params.ignore_eos else self._ends)
        logits = reference.logits(self._model, prompt + ids)[len(prompt) - 1 : -1]
        found = [*self._tokens(params, prompt, ids, logits, ends, number), *self._end(request, params, completion, ends)]
        found += _logprobs(request, completion, logits.log_softmax(-1))
        usage = completion.end.usage
        if (usage.prompt_tokens, usage.completion_tokens) != (len(prompt), len(ids)) or usage.cached_tokens >= len(prompt):
            found.append(f"usage {usage} of {len(prompt)} and {len(ids)}")
        return found

    def _tokens(
        self, params: SamplingParams, prompt: list[int], ids: list[int], logits: torch.Tensor, ends: set[int], number: int
    ) -> Iterator[str]:
        for index, token in enumerate(ids):
            scores = _processed(logits[index].double(), params, prompt, ids[:index])
            if index < params.min_tokens:
                scores[list(ends)] = -math.inf
            if params.temperature < COLD or params.top_k == 1:
                if scores[token] < scores.max() - _slack(params):
                    yield f"token {index} is {token}, greedy is {int(scores.argmax())}"
                continue
            weights = _filtered(scores, params)
            low, high = (float(weights[:stop].sum() / weights.sum()) for stop in (token, token + 1))
            # At a threshold one token more or less may be kept, which moves the others.
            slack = DRAW + (3 * (high - low) if (params.top_k, params.top_p, params.min_p) != (-1, 1.0, 0.0) else 0)
            if high == low:
                yield f"token {index}, {token}, was filtered out"
            elif params.seed is not None and _slack(params) < 10 * LOGIT:
                drawn = uniforms([(params.seed, number, index)])[0]
                if not low - slack <= drawn <= high + slack:
                    yield f"token {index} is {token}, from {low} to {high}, at {drawn}"

    def _end(self, request: pb.GenerateRequest, params: SamplingParams, completion: Completion, ends: set[int]) -> Iterator[str]:
        ids = completion.ids
        for index, token in enumerate(ids[:-1]):
            if token in ends and index + 1 >= params.min_tokens:
                yield f"it went on after token {index}, {token}, which ends it"
        is_stopped = ids[-1] in ends and len(ids) >= params.min_tokens
        text, kept, matched = self._text(request, ids, is_stopped, params.min_tokens)
        if (completion.text, len(ids), completion.end.matched_stop) != (text, kept, matched):
            given = (completion.text, len(ids), completion.end.matched_stop)
            yield f"text, tokens and stop string are {given}, not {(text, kept, matched)}"
        reason = "STOP" if is_stopped or matched else "LENGTH"
        if completion.reason != reason or (reason == "LENGTH" and len(ids) < params.max_tokens):
            yield f"it ended by {completion.reason} after {len(ids)} tokens, not by {reason}"

    def _text(self, request: pb.GenerateRequest, ids: list[int], is_stopped: bool, min_tokens: int) -> tuple[str, int, str]:
        """The text, how many tokens count, the stop string."""
        if request.ids_only:
            return "", len(ids), ""
        decoder, text = codecs.getincrementaldecoder("utf-8")("replace"), ""
        for count, token in enumerate(ids, 1):
            before, is_last = text, count == len(ids)
            text += decoder.decode(b"" if is_last and is_stopped else self._shown(token, request), is_last)
            if count >= min_tokens and (found := _first_stop(text, len(before), request.stop)) is not None:
                end, stop = found
                return text[: end if request.include_stop else end - len(stop)], count, stop
        return text, len(ids), ""

    def _shown(self, token: int, request: pb.GenerateRequest) -> bytes:
        if token in self._special:
            return self._special[token] if request.include_special_tokens else b""
        return self._bytes[token]


def _slack(params: SamplingParams) -> float:
    """Of a processed logit: a penalty may stretch the difference ten thousandfold."""
    return LOGIT * max(params.repetition_penalty, 1 / params.repetition_penalty)


def _processed(scores: torch.Tensor, params: SamplingParams, prompt: list[int], output: list[int]) -> torch.Tensor:
    for token in {*prompt, *output}:
        scores[token] *= params.repetition_penalty if scores[token] <= 0 else 1 / params.repetition_penalty
    for token in set(output):
        scores[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    for token, bias in params.logit_bias.items():
        scores[token] += bias
    return scores


def _filtered(scores: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """What is near a threshold is kept."""
    weights, slack = ((scores - scores.max()) / params.temperature).exp(), math.exp(-_slack(params) / params.temperature)
    if 0 < params.top_k < len(weights):
        weights[weights < weights.topk(params.top_k).values.min() * slack] = 0
    if params.top_p < 1:
        falling = weights.sort(descending=True).values
        count = int((falling.cumsum(0) < params.top_p * falling.sum()).sum()) + 1
        weights[weights < falling[count - 1] * slack] = 0
    weights[weights < params.min_p * slack] = 0
    return weights


def _first_stop(text: str, seen: int, stops: Sequence[str]) -> tuple[int, str] | None:
    """Where the first one to be complete after the seen characters ends; of several the longest."""
    ends = [(end, -len(stop), stop) for stop in stops for end in range(seen + 1, len(text) + 1) if text[:end].endswith(stop)]
    return (min(ends)[0], min(ends)[2]) if ends else None


def _logprobs(request: pb.GenerateRequest, completion: Completion, expected: torch.Tensor) -> Iterator[str]:
    wanted = completion.ids if request.HasField("logprobs") else []
    if [entry.token_id for entry in completion.logprobs] != wanted:
        yield f"logprobs of {[entry.token_id for entry in completion.logprobs]}"
        return
    for index, entry in enumerate(completion.logprobs):
        best = expected[index].topk(max(1, request.logprobs)).values[: request.logprobs].tolist()
        near = [abs(top.logprob - value) < LOGIT for top, value in zip(entry.top, best, strict=False)]
        own = [abs(one.logprob - float(expected[index, one.token_id])) < LOGIT for one in (entry, *entry.top)]
        if len(entry.top) != len(best) or not all(near) or not all(own):
            yield f"logprobs of token {index}: {entry}"
