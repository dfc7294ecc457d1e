"""Text as it streams: stop strings, characters of several tokens, the tail."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from common.rpc.gen.pdserve.v1 import generation_pb2 as pb
from tests.helpers.client import Client
from tests.helpers.cluster import Cluster
from tests.helpers.prompts import prompt
from tests.helpers.successor_model import make_saying_model

pytestmark = pytest.mark.cluster

TEXT = "Qé漢😀 zkXJ"
"""Begins after Q; every token is different; 2-, 3- and 4-byte characters, one byte a token."""


@pytest.fixture(scope="module")
def saying_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    model = make_saying_model(tmp_path_factory.mktemp("models") / "saying", TEXT)
    with Cluster(tmp_path_factory.mktemp("saying"), model, worker_args=["--pool-pages", "64"]) as running:
        yield running


@pytest.fixture
async def saying(saying_cluster: Cluster) -> AsyncIterator[Client]:
    async with saying_cluster.client() as connected:
        yield connected
        await saying_cluster.assert_idle(connected)


async def test_str_01_a_stop_string_over_several_tokens_is_never_leaked(counting: Client) -> None:
    text = (await counting.generate([34], sampling={"max_tokens": 60})).text
    for start, length in ((10, 3), (7, 5), (20, 1), (1, 2)):
        stop = text[start : start + length]
        answer = await counting.generate([34], stop=[stop], sampling={"max_tokens": 60})
        assert answer.text == text[: text.index(stop)] and answer.reason == "STOP"
        assert answer.only.end.matched_stop == stop
        included = await counting.generate([34], stop=["never", stop], include_stop=True, sampling={"max_tokens": 60})
        assert included.text == text[: text.index(stop) + length]
        assert answer.usage.completion_tokens == len(answer.ids) == len(included.ids)


async def test_str_03_any_stop_string_that_never_comes_changes_nothing(client: Client) -> None:
    for i in range(10):
        ids = prompt(5 + i, seed=300 + i)
        plain = await client.generate(ids, sampling={"max_tokens": 24})
        for stop in ("zq~zq", "never in the text, however long we wait for it " * 4):
            answer = await client.generate(ids, stop=[stop], sampling={"max_tokens": 24})
            assert (answer.text, answer.ids, answer.reason) == (plain.text, plain.ids, plain.reason)


async def test_str_03_the_deltas_are_the_text_of_their_ids(client: Client) -> None:
    for i in range(10):
        answer = await client.generate(
            prompt(4, seed=i), sampling={"max_tokens": 40, "ignore_eos": True}, include_special_tokens=True
        )
        whole = await client.stub.Detokenize(pb.DetokenizeRequest(token_ids=answer.ids, include_special_tokens=True), timeout=5)
        assert answer.text == whole.text


async def test_str_04_characters_of_several_tokens_arrive_whole(saying: Client) -> None:
    answer = await saying.generate(TEXT[0])
    assert answer.text == TEXT[1:] and answer.reason == "STOP"
    assert not [delta.text for delta in answer.only.deltas if "\ufffd" in delta.text]
    assert len(answer.ids) > len(TEXT)


async def test_str_04_a_stop_string_of_wide_characters(saying: Client) -> None:
    answer = await saying.generate(TEXT[0], stop=["😀 z"])
    assert answer.text == "é漢" and answer.reason == "STOP"


async def test_str_06_a_held_tail_comes_out_at_the_end(saying: Client) -> None:
    answer = await saying.generate(TEXT[0], stop=["XJ and more"])
    assert answer.text == TEXT[1:] and answer.reason == "STOP" and not answer.only.end.matched_stop
    cut = len((await saying.generate(TEXT[0])).ids) - 2
    tail = await saying.generate(TEXT[0], stop=["X and more"], sampling={"max_tokens": cut})
    assert tail.text == TEXT[1:-1] and tail.reason == "LENGTH"


async def test_str_08_a_character_cut_by_max_tokens_ends_as_one_replacement(saying: Client) -> None:
    for max_tokens, text in ((1, "\ufffd"), (2, "é"), (4, "é\ufffd"), (5, "é漢"), (8, "é漢\ufffd"), (9, "é漢😀")):
        answer = await saying.generate(TEXT[0], sampling={"max_tokens": max_tokens})
        assert (answer.text, answer.reason) == (text, "LENGTH")


async def test_str_08_a_lone_continuation_byte_is_one_replacement(client: Client) -> None:
    from tokenizers import pre_tokenizers

    lone = sorted(pre_tokenizers.ByteLevel.alphabet()).index("Ģ")  # byte 0x80
    answer = await client.generate([1, 2], sampling={"max_tokens": 3, "ignore_eos": True, "logit_bias": {lone: 100.0}})
    assert answer.ids == [lone] * 3 and answer.text == "\ufffd" * 3


async def test_ids_only_gives_ids_and_no_text(counting: Client) -> None:
    answer = await counting.generate([10], ids_only=True, sampling={"max_tokens": 30})
    assert answer.ids == list(range(11, 41)) and not answer.text


async def test_hnd_02_max_tokens_yields_exactly_that_many(counting: Client) -> None:
    longest = (await counting.generate([65], sampling={"max_tokens": 8})).text
    for max_tokens in (1, 2, 3):
        answer = await counting.generate([65], sampling={"max_tokens": max_tokens})
        assert answer.ids == list(range(66, 66 + max_tokens)) and answer.reason == "LENGTH"
        assert longest.startswith(answer.text)
