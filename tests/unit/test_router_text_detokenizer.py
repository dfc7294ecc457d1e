"""Text that comes token by token equals the text of all tokens, for every kind of decoder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders

from router.text.detokenizer import ByteDetokenizer, Detokenizer, RunDetokenizer, WindowDetokenizer, make_detokenizer
from router.text.tokenizer import Tokenizer
from tests.helpers.text_models import byte_fallback, byte_level, words, write_model

pytestmark = pytest.mark.unit

MADE: dict[str, Callable[[], Any]] = {
    "byte level": byte_level,
    "byte fallback": byte_fallback,
    "byte fallback without strip": lambda: byte_fallback(strip=False),
    "no decoder": words,
    "wordpiece": lambda: words(decoders.WordPiece()),
    "metaspace": lambda: words(decoders.Metaspace()),
    "bpe suffix": lambda: words(decoders.BPEDecoder()),
}
KINDS: dict[str, type] = {
    "byte level": ByteDetokenizer,
    "byte fallback": RunDetokenizer,
    "byte fallback without strip": RunDetokenizer,
}


@pytest.fixture(scope="module")
def made() -> Iterator[dict[str, Tokenizer]]:
    with TemporaryDirectory() as folder:
        # Some ids more than the tokenizer has: models round their vocabulary up.
        yield {
            name: Tokenizer(write_model(Path(folder) / name, tokenizer, vocab_size=tokenizer.get_vocab_size() + 3))
            for name, tokenizer in ((name, make()) for name, make in MADE.items())
        }


def pushed(detokenizer: Detokenizer, chunks: list[list[int]]) -> list[str]:
    return [detokenizer.push(chunk) for chunk in chunks] + [detokenizer.flush()]


@pytest.mark.parametrize("name", MADE)
def test_each_decoder_takes_its_way(made: dict[str, Tokenizer], name: str) -> None:
    assert type(make_detokenizer(made[name], include_special=False)) is KINDS.get(name, WindowDetokenizer)


@pytest.mark.parametrize("include_special", [False, True])
@pytest.mark.parametrize("name", MADE)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_the_pieces_of_any_ids_in_any_chunks_are_the_whole_text(
    made: dict[str, Tokenizer], name: str, include_special: bool, data: st.DataObject
) -> None:
    tokenizer = made[name]
    token_id = st.integers(0, tokenizer.vocab_size - 1)
    if name.startswith("byte fallback"):
        token_id |= st.sampled_from([1 + byte for byte in "é東😀".encode()])  # or hardly any run would be valid
    chunks = data.draw(st.lists(st.lists(token_id, min_size=1, max_size=5), max_size=12))
    got = pushed(make_detokenizer(tokenizer, include_special=include_special), chunks)
    assert "".join(got) == tokenizer.decode(sum(chunks, []), include_special=include_special)


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=40))
def test_str_04_real_text_streams_without_a_replacement_character(made: dict[str, Tokenizer], text: str) -> None:
    tokenizer = made["byte level"]
    got = pushed(make_detokenizer(tokenizer, include_special=True), [[token_id] for token_id in tokenizer.encode(text)])
    assert "".join(got) == text
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in got)


def ids_of(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """One byte-level token per byte."""
    by_text = (
        {piece: token_id for token_id, piece in reversed(list(enumerate(tokenizer.shown.pieces)))} if tokenizer.shown else {}
    )
    return [by_text[bytes([byte]).decode() if byte < 0x80 else bytes([byte])] for byte in data]


@pytest.mark.parametrize(
    ("data", "pieces"),
    [
        ("a😀b".encode(), ["a", "", "", "", "😀", "b", ""]),
        ("😀".encode()[:3], ["", "", "", "\ufffd"]),  # cut by max_tokens
        (b"a\x80b", ["a", "\ufffd", "b", ""]),  # a lone continuation byte
        (b"\xe6\x9da", ["", "", "\ufffda", ""]),  # a character that never comes
        (b"\xff\xfe", ["\ufffd", "\ufffd", ""]),
        (b"\xed\xa0\x80", ["", "", "\ufffd" * 3, ""]),  # a surrogate
        (b"\xed\xa0a", ["", "", "\ufffd\ufffda", ""]),
    ],
)
def test_str_08_bytes_that_are_no_character_become_one_replacement_each(
    made: dict[str, Tokenizer], data: bytes, pieces: list[str]
) -> None:
    tokenizer = made["byte level"]
    got = pushed(make_detokenizer(tokenizer, include_special=False), [[token_id] for token_id in ids_of(tokenizer, data)])
    assert got == pieces and "".join(got) == data.decode(errors="replace")


def test_a_special_token_that_is_not_shown_does_not_end_a_character(made: dict[str, Tokenizer]) -> None:
    tokenizer = made["byte level"]
    first, *rest = ids_of(tokenizer, "é".encode())
    special = min(tokenizer.special_ids)
    assert pushed(make_detokenizer(tokenizer, include_special=False), [[first], [special], rest]) == ["", "", "é", ""]
    assert (
        "".join(pushed(make_detokenizer(tokenizer, include_special=True), [[first], [special], rest])) == "\ufffd<|start|>\ufffd"
    )


def test_text_that_stays_undecided_is_held_for_a_bounded_number_of_tokens(tmp_path: Path) -> None:
    made = byte_fallback()
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Replace("▁", " "), decoders.Fuse()])  # an unusual order
    detokenizer = make_detokenizer(Tokenizer(write_model(tmp_path, made)), include_special=False)
    assert type(detokenizer) is WindowDetokenizer
    invalid_byte = 1 + 0xFF
    got = [detokenizer.push([invalid_byte]) for _ in range(500)] + [detokenizer.flush()]
    assert "".join(got) == "\ufffd" * 500
    assert max(map(len, got)) == 64
