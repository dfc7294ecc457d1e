"""Deltas of one completion."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from common.model_dir import ModelDir
from common.rpc.gen.pdserve.v1 import generation_pb2, work_pb2
from router.text.output import ABSORB_TOKENS, DELTA_TOKENS, Output
from router.text.text_stream import TextStream
from router.text.tokenizer import Tokenizer
from tests.helpers.tiny_model import make_tiny_model

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    model: Path = make_tiny_model(tmp_path_factory.mktemp("output") / "tiny")
    return Tokenizer(ModelDir.open(model))


def push(output: Output, ids: Sequence[int], *, finish: int = 0) -> None:
    for index, token_id in enumerate(ids, output.count):
        output.push(work_pb2.Token(index=index, token_id=token_id, logprob=-1.0, top_ids=[token_id], top_logprobs=[-1.0]))
    if finish:
        output.push(work_pb2.Token(index=output.count + len(ids), token_id=3, finish=generation_pb2.FinishReason.Name(finish)))


def taken(output: Output, *, ended: bool = False) -> list[generation_pb2.Delta]:
    return [response.delta for response in output.take(ended=ended)]


def test_ids_only_gathers_and_takes_once() -> None:
    output = Output(None, request_id="r", number=0, logprobs=False)
    push(output, [1, 2])
    push(output, [3])
    (delta,) = taken(output)
    assert list(delta.token_ids) == [1, 2, 3] and output.count == 3
    assert output.take(ended=False) == []


def test_tokens_after_a_stop_string_are_dropped_and_not_counted(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("one two")
    output = Output(TextStream(tokenizer, stop=[" "]), request_id="r", number=0, logprobs=False)
    push(output, ids)
    (delta,) = taken(output)
    assert delta.text == "one" and output.matched_stop == " "
    assert output.count == len(delta.token_ids) < len(ids)
    push(output, ids)
    assert output.take(ended=True) == [] and output.count == len(delta.token_ids)


def test_a_stop_string_is_found_although_nobody_reads(tokenizer: Tokenizer) -> None:
    output = Output(TextStream(tokenizer, stop=["zz"]), request_id="r", number=0, logprobs=False)
    push(output, tokenizer.encode("z" * 4) + [5] * ABSORB_TOKENS)
    assert output.matched_stop == "zz"


def test_what_is_held_back_comes_out_at_the_end_str_06(tokenizer: Tokenizer) -> None:
    output = Output(TextStream(tokenizer, stop=["tail end"]), request_id="r", number=0, logprobs=False)
    push(output, tokenizer.encode("a tail"))
    (first,) = taken(output)
    (last,) = taken(output, ended=True)
    assert (first.text, last.text, list(last.token_ids)) == ("a ", "tail", [])


def test_logprobs_stay_with_their_tokens_when_coalesced_usg_04(tokenizer: Tokenizer) -> None:
    output = Output(TextStream(tokenizer), request_id="r", number=0, logprobs=True)
    push(output, [10, 20, 30])
    (delta,) = taken(output)
    assert [(entry.token_id, entry.top[0].token_id) for entry in delta.logprobs] == [(10, 10), (20, 20), (30, 30)]


@pytest.mark.parametrize("logprobs", [False, True])
def test_what_a_slow_reader_left_comes_in_deltas_of_bounded_size_cap_05(tokenizer: Tokenizer, logprobs: bool) -> None:
    output = Output(TextStream(tokenizer), request_id="r", number=0, logprobs=logprobs)
    ids = [i % 90 for i in range(3 * DELTA_TOKENS)]
    push(output, ids)
    deltas = taken(output, ended=True)
    assert [token for delta in deltas for token in delta.token_ids] == ids
    assert "".join(delta.text for delta in deltas) == tokenizer.decode(ids, include_special=False)
    assert max(len(delta.token_ids) for delta in deltas) < DELTA_TOKENS + ABSORB_TOKENS
