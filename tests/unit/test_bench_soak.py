"""The soak's judges: which answers are wrong, and when memory grows."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tokenizers import Tokenizer

from bench.fleet.model import BYTES, make_model
from bench.soak.memory import growth
from bench.soak.soak import Verdict, what_is_wrong
from bench.soak.wishes import Taste, Wish, wishes
from common.core import SamplingParams
from common.engine.sim.tokens import SimVocabulary
from common.model_dir import ModelDir
from common.rpc.gen.pdserve.v1 import generation_pb2 as pb
from tests.helpers.client import Answer

WORDS = SimVocabulary(BYTES + 1, frozenset({BYTES}))
WISH = Wish([1, 2, 3], 12, 1, SamplingParams(temperature=0.5, seed=4), cancel_after=None, hurts=False)


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = make_model(tmp_path_factory.mktemp("model"))
    assert ModelDir.open(folder, need_weights=False).eos_token_ids == (BYTES,)
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def answer(ids: Sequence[int], text: str, *, completions: int = 1) -> Answer:
    said = Answer()
    said.add(pb.GenerateResponse(started=pb.Started()))
    for index in range(completions):
        said.add(pb.GenerateResponse(index=index, delta=pb.Delta(text=text, token_ids=ids)))
        said.add(pb.GenerateResponse(index=index, finished=pb.Finished()))
    return said


def verdict(ids: Sequence[int], words: Tokenizer, *, text: str | None = None, whole: bool = True, completions: int = 1) -> str:
    said = answer(ids, words.decode(ids) if text is None else text, completions=completions)
    return what_is_wrong(WISH, said, vocabulary=WORDS, words=words, whole=whole)


def test_the_expected_answer_is_right_and_the_beginning_of_one_that_was_cut(words: Tokenizer) -> None:
    expected = WISH.answer(0, WORDS)
    assert verdict(expected, words) == ""
    assert verdict(expected[:5], words, whole=False) == ""


def test_every_damage_is_seen(words: Tokenizer) -> None:
    expected = WISH.answer(0, WORDS)
    assert verdict(expected[:-1], words) == "completion 0: 11 of 12 tokens, wrong from 11"
    assert verdict([*expected, 1], words) == "completion 0: 13 of 12 tokens, wrong from 12"
    for damaged in (expected[:4] + expected[5:], [*expected[:4], expected[3], *expected[4:]], expected[:4] + expected[4:6][::-1]):
        assert "wrong from" in verdict(damaged, words)
        assert "wrong from" in verdict(damaged, words, whole=False)
    assert verdict(expected, words, text="something else") == "completion 0: its text is not that of its tokens"
    assert verdict(expected, words, completions=2) == "2 of 1 completions"


def test_the_same_seed_wishes_the_same() -> None:
    first, again = (list(wishes(500, Taste(), seed=3)) for _ in range(2))
    assert first == again != list(wishes(500, Taste(), seed=4))
    assert all(1 <= len(wish.prompt) <= 400 and 1 <= wish.tokens <= 48 for wish in first)
    assert 0 < sum(wish.hurts for wish in first) < 20 and 0 < sum(wish.cancel_after is not None for wish in first) < 40


def test_growth_compares_the_end_with_the_middle() -> None:
    assert growth([100] * 40) == 0.0
    assert growth([*range(1, 51), *[100] * 45, *[150] * 5, *[110] * 0]) == pytest.approx(0.25)
    assert growth([500] * 50 + [100] * 50) == 0.0, "what was before the middle does not count"
    with pytest.raises(ValueError, match="at least 10 samples, got 9"):
        growth([1] * 9)


def test_what_speaks_against_a_run_is_said() -> None:
    from bench.soak.__main__ import judge

    assert judge(Verdict(), {"router": 0.049}) == []
    bad = Verdict(wrong=["completion 0: ..."], leaks="decode-1: 3 held")
    bad.failed["UNAVAILABLE: gone"] = 2
    assert judge(bad, {"router": 0.05}) == [
        "wrong: completion 0: ...",
        "2 failed: UNAVAILABLE: gone",
        "not at rest: decode-1: 3 held",
        "router grew by 5.0% in the second half",
    ]
