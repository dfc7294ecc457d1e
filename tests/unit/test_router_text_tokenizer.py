"""Text to ids and back, whatever form the tokenizer's files have."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import processors

from common.errors import InvalidRequest, OutOfRange, StartError
from common.rpc.gen.pdserve.v1 import generation_pb2 as pb2
from router import served_model
from router.request.rules import LengthRule
from router.text.chat_template import ChatTemplate
from router.text.tokenizer import LONG_CHARS, Tokenizer
from tests.helpers.eventually import once_below
from tests.helpers.text_models import byte_fallback, byte_level, words, write_model

pytestmark = pytest.mark.unit


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return Tokenizer(write_model(tmp_path, byte_level(), vocab_size=500))


@pytest.mark.parametrize("text", ["", " ", "The capital", "Straße 東京 😀 👩‍👩‍👧\r\n\t\x00", "<|start|>x<|end|>", "\ufffd"])
def test_byte_level_texts_survive_the_round_trip(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text), include_special=True) == text


def test_special_tokens_in_text_become_ids_and_are_left_out_of_text(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<|start|>a<|end|>")
    assert set(ids) - {ids[1]} == tokenizer.special_ids and len(ids) == 3
    assert tokenizer.decode(ids, include_special=False) == "a"


def test_ids_that_only_the_model_has_add_no_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 500 and tokenizer.token_text(499) == ""
    assert tokenizer.decode([499], include_special=True) == ""


def test_a_token_has_a_text_of_its_own(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (start,) = tokenizer.encode("<|start|>")
    (x,) = tokenizer.encode("x")
    assert (tokenizer.token_text(start), tokenizer.token_text(x)) == ("<|start|>", "x")
    fallback = Tokenizer(write_model(tmp_path / "f", byte_fallback()))
    assert [fallback.token_text(i) for i in (1 + 0x41, 1 + 0xC3, 258, 259)] == ["A", "\ufffd", " the", " cap"]
    word = Tokenizer(write_model(tmp_path / "w", words()))
    assert word.token_text(1) == "one"


def test_the_tokens_that_the_tokenizer_adds_by_default_are_added_to_text_alone(tmp_path: Path) -> None:
    made = byte_level()
    start = made.token_to_id("<|start|>")
    made.post_processor = processors.TemplateProcessing(single="<|start|> $A", special_tokens=[("<|start|>", start)])
    tokenizer = Tokenizer(write_model(tmp_path, made))
    assert tokenizer.encode("a") == [start, *tokenizer.encode("a", add_special=False)]


def test_a_prompt_is_never_cut_or_filled_by_settings_saved_with_the_tokenizer(tmp_path: Path) -> None:
    made = byte_level()
    made.enable_truncation(4)
    made.enable_padding(length=64)
    tokenizer = Tokenizer(write_model(tmp_path, made))
    assert len(tokenizer.encode("qqqqqqqqqq")) == 10


def test_lone_surrogates_are_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="prompt must be valid Unicode") as caught:
        tokenizer.encode("a\ud800")
    str(caught.value).encode()


@pytest.mark.quiet
async def test_cap_09_a_long_text_does_not_hold_up_the_event_loop(tokenizer: Tokenizer) -> None:
    text = "The capital of France is Paris. " * 60_000

    async def worst_pause() -> float:
        encoding = asyncio.create_task(tokenizer.encode_async(text))
        worst, ticks = 0.0, 0
        while not encoding.done():
            before = time.perf_counter()
            await asyncio.sleep(0.005)
            worst, ticks = max(worst, time.perf_counter() - before), ticks + 1
        assert ticks > 5
        assert tokenizer.decode(await encoding, include_special=True) == text
        return worst

    await once_below(0.2, worst_pause)


def test_bnd_01_a_text_beyond_the_rule_is_refused_with_its_length_and_one_far_beyond_by_its_beginning(
    tokenizer: Tokenizer,
) -> None:
    rule = LengthRule(10, "the context of 11 less one")
    fitting = "<|end|>" * 10
    assert len(tokenizer.encode(fitting, rule=rule)) == 10, "a long text of few tokens"
    with pytest.raises(OutOfRange) as caught:
        tokenizer.encode(fitting + "<|end|>", rule=rule)
    assert str(caught.value) == "prompt must have at most 10 tokens (the context of 11 less one), got 11"
    with pytest.raises(OutOfRange) as caught:
        tokenizer.encode("\x00" * 1_000, rule=rule)
    where = "not that many in its first 21 of 1000 characters"
    assert str(caught.value) == f"prompt must have at most 10 tokens (the context of 11 less one), {where}, got 21"


async def test_tokenize_takes_more_than_a_prompt_may_have_and_not_more_than_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_model, "LISTED", LengthRule(100, "what is listed"))
    model = served_model.ServedModel(write_model(tmp_path, byte_level(), vocab_size=500), max_context=20)
    assert len(await model.tokenize(pb2.TokenizeRequest(text="\x00" * 100))) == 100
    for length in (101, 100_000):
        with pytest.raises(OutOfRange, match=r"at most 100 tokens \(what is listed\)"):
            await model.tokenize(pb2.TokenizeRequest(text="\x00" * length))


async def test_cap_07_long_texts_are_encoded_one_at_a_time(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    began: list[int] = []
    at_once: list[int] = []

    def encode(text: str, **_: Any) -> list[int]:
        began.append(1)
        time.sleep(0.01)
        at_once.append(len(began))
        began.pop()
        return []

    monkeypatch.setattr(tokenizer, "encode", encode)
    await asyncio.gather(*(tokenizer.encode_async("x" * (LONG_CHARS + 1)) for _ in range(5)))
    assert at_once == [1] * 5


async def test_short_and_long_texts_encode_the_same_either_way(tokenizer: Tokenizer) -> None:
    for text in ("Paris", "Paris " * 1000):
        assert await tokenizer.encode_async(text) == tokenizer.encode(text)


FORMS: list[dict[str, Any]] = [
    {"eos_token": "one"},
    {"additional_special_tokens": ["one"], "bos_token": None},
    {"extra_special_tokens": {"first_token": "one"}},
    {"eos_token": {"content": "one", "special": True, "lstrip": False}},
    {"additional_special_tokens": [{"content": "one"}]},
]


@pytest.mark.parametrize("config", FORMS)
def test_lif_11_a_token_that_only_the_config_calls_special_is_special(tmp_path: Path, config: dict[str, Any]) -> None:
    tokenizer = Tokenizer(write_model(tmp_path, words(), tokenizer_config=config))
    ids = tokenizer.encode("two one two")
    assert tokenizer.decode(ids, include_special=False) == "two two"
    assert tokenizer.decode(ids, include_special=True) == "two one two"


def test_lif_11_tokens_that_only_the_config_has_are_added(tmp_path: Path) -> None:
    made = byte_level()
    size = made.get_vocab_size()
    added = {str(size): {"content": "<|tool|>", "special": True}, str(size + 1): {"content": "<plain>"}}
    config = {"eos_token": "<|tool|>", "bos_token": None, "added_tokens_decoder": added}
    model = write_model(tmp_path, made, vocab_size=size + 2, tokenizer_config=config)
    tokenizer = Tokenizer(model)
    assert model.eos_token_ids == (size,)
    assert tokenizer.encode("<|tool|><plain>") == [size, size + 1]
    assert tokenizer.decode([size, size + 1], include_special=False) == "<plain>"


def test_lif_11_added_tokens_at_another_place_than_the_config_says_stop_the_start(tmp_path: Path) -> None:
    config = {"added_tokens_decoder": {"7": {"content": "<|tool|>"}}}
    with pytest.raises(StartError, match=r"tokenizer_config.json adds '<\|tool\|>' as 7, tokenizer.json has it as \d+"):
        Tokenizer(write_model(tmp_path, byte_level(), tokenizer_config=config))


def test_lif_11_a_file_that_is_no_tokenizer_stops_the_start_in_one_line(tmp_path: Path) -> None:
    model = write_model(tmp_path, byte_level())
    model.tokenizer_file.write_text('{"model": {"type": "Nobody"}}')
    with pytest.raises(StartError, match="tokenizer.json is not a usable tokenizer: ") as caught:
        Tokenizer(model)
    assert "\n" not in str(caught.value)


STRING_FORMS = [{}, {"eos_token": "<|end|>", "bos_token": "<|start|>"}]


@pytest.mark.parametrize(
    ("make", "config"),
    [(make, config) for make in (byte_level, byte_fallback, words) for config in STRING_FORMS]
    + [(words, config) for config in FORMS[:3]],
)
def test_ids_and_texts_are_those_of_transformers(tmp_path: Path, make: Callable[[], Any], config: dict[str, Any]) -> None:
    from transformers import AutoTokenizer

    template = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{{ eos_token }}"
    model = write_model(
        tmp_path, make(), tokenizer_config={"tokenizer_class": "PreTrainedTokenizerFast", **config}, chat_template=template
    )
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), Tokenizer(model)
    for text in ("ab <|start|> two one 東京 😀<|end|>", "\n\n  a", "<plain é added>\ufffd"):
        ids = ours.encode(text)
        assert ids == theirs(text)["input_ids"]
        for special in (False, True):
            assert ours.decode(ids, include_special=special) == theirs.decode(
                ids, skip_special_tokens=not special, clean_up_tokenization_spaces=False
            )
    chat = [{"role": "user", "content": "two one"}, {"role": "assistant", "content": ""}]
    rendered = ChatTemplate(template, model.special_tokens).render(chat, {})
    assert rendered == theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    wanted = theirs.apply_chat_template(chat, tokenize=True, add_generation_prompt=True, return_dict=False)
    assert ours.encode(rendered, add_special=False) == wanted
