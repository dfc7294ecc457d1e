"""From tokens to what a client sees: text, which tokens count, where it ends."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.core import SamplingParams
from common.work import FinishReason, TokenOut
from common.work_key import WorkKey
from router.request.valid_request import TextPrompt, ValidRequest
from router.text.text_stream import TextPiece, TextStream, TokenText
from router.text.tokenizer import Tokenizer
from tests.helpers.text_models import byte_fallback, byte_level, write_model

pytestmark = pytest.mark.unit

KEY = WorkKey(1, 2, 1)
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    with TemporaryDirectory() as folder:
        return Tokenizer(write_model(Path(folder), byte_level()))


def tokens_of(tokenizer: Tokenizer, text: str | bytes, *, finish: FinishReason | None = None, first: int = 0) -> list[TokenOut]:
    """One token per byte; the last carries finish."""
    assert tokenizer.shown is not None
    data = text.encode() if isinstance(text, str) else text
    pieces = tokenizer.shown.pieces
    ids = [pieces.index(bytes([byte]).decode() if byte < 0x80 else bytes([byte])) for byte in data]
    made = [TokenOut(KEY, first + i, token_id) for i, token_id in enumerate(ids)]
    return [*made[:-1], made[-1]._replace(finish=finish)]


def eos(tokenizer: Tokenizer, index: int) -> TokenOut:
    return TokenOut(KEY, index, max(tokenizer.special_ids), finish=STOP)


def test_without_stop_strings_all_tokens_count_and_come_as_text(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer)
    assert stream.push(tokens_of(tokenizer, "hello")) == TextPiece("hello", 5, None)
    assert stream.push(tokens_of(tokenizer, " é", finish=LENGTH)) == TextPiece(" é", 3, None)
    assert stream.finish() == ""


@pytest.mark.parametrize("include_special", [False, True])
@pytest.mark.parametrize("stop", [(), ("zz",)])
def test_usg_01_the_token_that_ends_with_stop_counts_and_has_no_text(
    tokenizer: Tokenizer, stop: tuple[str, ...], include_special: bool
) -> None:
    stream = TextStream(tokenizer, stop=stop, include_special=include_special)
    assert stream.push([*tokens_of(tokenizer, "hi"), eos(tokenizer, 2)]) == TextPiece("hi", 3, None)
    alone = TextStream(tokenizer, stop=stop, include_special=include_special)
    assert alone.push([eos(tokenizer, 0)]) == TextPiece("", 1, None)


def test_a_stop_token_with_a_text_of_its_own_has_none_either(tokenizer: Tokenizer) -> None:
    assert TextStream(tokenizer).push(tokens_of(tokenizer, "hi.", finish=STOP)) == TextPiece("hi", 3, None)


@pytest.mark.parametrize("stop", [(), ("zz",)])
def test_an_ignored_end_token_shows_only_if_asked_for(tokenizer: Tokenizer, stop: tuple[str, ...]) -> None:
    ignored = eos(tokenizer, 0)._replace(finish=None)
    assert TextStream(tokenizer, stop=stop).push([ignored]).text == ""
    assert TextStream(tokenizer, stop=stop, include_special=True).push([ignored]).text == "<|end|>"


def test_str_01_tokens_after_a_stop_string_are_dropped_and_not_counted(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, stop=["llo"])
    assert stream.push(tokens_of(tokenizer, "hel")) == TextPiece("he", 3, None)
    assert stream.push(tokens_of(tokenizer, "lo wor")) == TextPiece("", 2, "llo")
    included = TextStream(tokenizer, stop=["llo"], include_stop=True)
    assert included.push(tokens_of(tokenizer, "hello world")) == TextPiece("hello", 5, "llo")


def test_a_stop_string_completed_by_the_last_token_wins_over_length(tokenizer: Tokenizer) -> None:
    assert TextStream(tokenizer, stop=["lo"]).push(tokens_of(tokenizer, "hello", finish=LENGTH)) == TextPiece("hel", 5, "lo")


def test_str_06_what_was_held_for_a_stop_string_comes_with_the_last_token(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, stop=["lo!"])
    assert stream.push(tokens_of(tokenizer, "hell")) == TextPiece("hel", 4, None)
    assert stream.push(tokens_of(tokenizer, "o", finish=LENGTH, first=4)) == TextPiece("lo", 1, None)
    assert stream.finish() == ""


def test_what_was_held_comes_out_when_a_completion_is_aborted(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, stop=["lo!"])
    assert stream.push(tokens_of(tokenizer, b"lo\xc3")).text == ""
    assert stream.finish() == "lo\ufffd"
    assert TextStream(tokenizer).finish() == ""


@pytest.mark.parametrize("stop", [(), ("zz",)])
def test_str_08_bytes_of_a_cut_character_come_out_with_the_last_token(tokenizer: Tokenizer, stop: tuple[str, ...]) -> None:
    stream = TextStream(tokenizer, stop=stop)
    cut = tokens_of(tokenizer, "a😀".encode()[:4], finish=LENGTH)
    assert stream.push(cut) == TextPiece("a\ufffd", 4, None)


@pytest.mark.parametrize(("min_tokens", "kept", "text"), [(0, 2, ""), (2, 2, ""), (3, 4, "xy"), (4, 4, "xy"), (5, 6, "xyxy")])
def test_a_stop_string_ends_nothing_before_min_tokens(tokenizer: Tokenizer, min_tokens: int, kept: int, text: str) -> None:
    whole = tokens_of(tokenizer, "xyxyxyxy")
    assert TextStream(tokenizer, stop=["xy"], min_tokens=min_tokens).push(whole) == TextPiece(text, kept, "xy")


def test_ids_only_makes_no_text(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, ids_only=True)
    tokens = [token._replace(logprob=-1.0, top=((5, -1.0),)) for token in tokens_of(tokenizer, "hi", finish=LENGTH)]
    assert stream.push(tokens) == TextPiece("", 2, None)
    assert stream.finish() == ""
    assert [entry.text for entry in stream.logprobs(tokens)] == ["", ""]


def test_usg_04_each_token_of_a_push_has_its_own_logprobs_and_texts(tokenizer: Tokenizer) -> None:
    h, lead = tokens_of(tokenizer, b"h\xc3")
    tokens = [h._replace(logprob=-0.5, top=((h.token_id, -0.5), (lead.token_id, -2.0))), lead._replace(logprob=-0.25), h]
    assert TextStream(tokenizer).logprobs(tokens) == [
        TokenText(h.token_id, -0.5, "h", ((h.token_id, -0.5, "h"), (lead.token_id, -2.0, "\ufffd"))),
        TokenText(lead.token_id, -0.25, "\ufffd", ()),
    ]


def test_a_stream_is_made_as_its_request_asks(tokenizer: Tokenizer) -> None:
    request = ValidRequest(
        request_id="", prompt=TextPrompt("x"), sampling=SamplingParams(min_tokens=3), max_tokens_given=False, stop=("b",),
        include_stop=True, logprobs=None, n=1, priority=0, include_special_tokens=False, ids_only=False,
    )  # fmt: skip
    assert TextStream.of(tokenizer, request).push(tokens_of(tokenizer, "abab")) == TextPiece("abab", 4, "b")


def test_a_stop_string_made_of_fallback_bytes_is_found_at_the_end(tmp_path: Path) -> None:
    fallback = Tokenizer(write_model(tmp_path, byte_fallback()))
    tokens = [TokenOut(KEY, i, 1 + byte) for i, byte in enumerate("😀".encode())]
    stream = TextStream(fallback, stop=["😀"])
    assert stream.push(tokens[:3]) == TextPiece("", 3, None)
    assert stream.push([tokens[3]._replace(finish=LENGTH)]) == TextPiece("", 1, "😀")


@settings(max_examples=200, deadline=None)
@given(data=st.data(), stop=st.lists(st.text("abé😀", min_size=1, max_size=3), max_size=3))
def test_str_03_the_cut_into_pushes_changes_neither_text_nor_count(
    tokenizer: Tokenizer, data: st.DataObject, stop: list[str]
) -> None:
    raw = data.draw(st.text("abé😀", min_size=1, max_size=10)).encode()
    tokens = tokens_of(tokenizer, raw, finish=data.draw(st.sampled_from([LENGTH, STOP])))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(tokens)), max_size=5)) | {len(tokens)})
    stream, text, kept, matched = TextStream(tokenizer, stop=stop), "", 0, None
    for begin, end in zip([0, *cuts], cuts, strict=False):
        piece = stream.push(tokens[begin:end])
        text, kept, matched = text + piece.text, kept + piece.tokens_kept, piece.matched_stop
        if matched is not None:
            break
    assert TextPiece(text, kept, matched) == TextStream(tokenizer, stop=stop).push(tokens)
