"""Stop strings: found wherever they lie in the pieces, never leaked, nothing hidden at the end."""

from __future__ import annotations

import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from router.text.stop_strings import StopStrings

pytestmark = pytest.mark.unit

Run = tuple[list[str], str | None, int]


def run(stops: list[str], pieces: list[str], *, include: bool = False) -> Run:
    """What was emitted, the stop string found, and after which piece."""
    search = StopStrings(stops, include=include)
    out: list[str] = []
    for count, piece in enumerate(pieces, 1):
        result = search.push(piece)
        out.append(result.text)
        if result.matched is not None:
            return out, result.matched, count
    return [*out, search.flush()], None, len(pieces)


def naive(stops: list[str], text: str) -> tuple[int, str] | None:
    """Over the whole text: where the first stop string to be complete begins, and which."""
    found = [(text.find(stop) + len(stop), text.find(stop), stop) for stop in stops if stop in text]
    return min(found)[1:] if found else None


stop_lists = st.lists(st.text("ab.", min_size=1, max_size=5), min_size=1, max_size=4)


@settings(max_examples=500, deadline=None)
@given(stops=stop_lists, pieces=st.lists(st.text("ab.", max_size=4), max_size=12), include=st.booleans())
@example(stops=["abcdef", "cd"], pieces=["abc", "def"], include=False)
@example(stops=["aab"], pieces=["a", "a", "a", "b"], include=False)
def test_the_answer_is_that_of_a_search_over_the_whole_text(stops: list[str], pieces: list[str], include: bool) -> None:
    text = "".join(pieces)
    out, matched, count = run(stops, pieces, include=include)
    expected = naive(stops, text)
    if expected is None:
        assert (matched, "".join(out)) == (None, text)
        return
    start, stop = expected
    assert (matched, "".join(out)) == (stop, text[: start + len(stop)] if include else text[:start])
    # Found with the piece that completes it, neither earlier nor later.
    assert len("".join(pieces[: count - 1])) < start + len(stop) <= len("".join(pieces[:count]))


@settings(max_examples=300, deadline=None)
@given(stops=stop_lists, pieces=st.lists(st.text("ab.", max_size=4), max_size=12))
def test_str_01_no_piece_let_out_belongs_to_a_stop_string_that_comes_later(stops: list[str], pieces: list[str]) -> None:
    out, _, count = run(stops, pieces)
    expected = naive(stops, "".join(pieces))
    limit = len("".join(pieces)) if expected is None else expected[0]
    for pushed in range(count):
        assert len("".join(out[: pushed + 1])) <= limit


@settings(max_examples=300, deadline=None)
@given(stops=stop_lists, pieces=st.lists(st.text("ab.", max_size=4), max_size=12))
def test_no_more_is_held_than_may_still_become_a_stop_string(stops: list[str], pieces: list[str]) -> None:
    search = StopStrings(stops, include=False)
    text = emitted = ""
    for piece in pieces:
        result = search.push(piece)
        text += piece
        emitted += result.text
        if result.matched is not None:
            return
        held = text[len(emitted) :]
        assert text.startswith(emitted) and (not held or any(stop.startswith(held) for stop in stops))


def test_a_stop_string_that_may_not_end_the_text_passes_whole_and_hides_no_later_one() -> None:
    search = StopStrings(["xy", "yxz"], include=False)
    assert search.push("xy", may_end=False) == ("x", None)
    assert search.push("x") == ("", None)
    assert search.push("z") == ("", "yxz")


def test_str_06_a_tail_that_only_began_a_stop_string_comes_out_at_the_end() -> None:
    assert run(["###END###"], ["text #", "##E", "N"]) == (["text ", "", "", "###EN"], None, 3)


@pytest.mark.parametrize("stop", ["^", "]", "\\", "-", "[a-z]", ".*", "\n\n", "😀", "&&", "~~", "||", "#", " "])
def test_characters_that_mean_something_to_a_pattern_are_only_themselves(stop: str) -> None:
    assert run([stop], ["abc", stop, "d"]) == (["abc", ""], stop, 2)
    assert run([stop], ["abc", "xyz"]) == (["abc", "xyz", ""], None, 2)


@pytest.mark.parametrize(
    "stops", [["a" * 1023 + "b"], ["a" * (1000 + i) + "b" for i in range(16)], ["ab" * 500 + "c", "ba" * 500 + "c"]]
)
def test_cap_07_a_hostile_stop_string_costs_little_per_token(stops: list[str]) -> None:
    search = StopStrings(stops, include=False)
    text = "ab" * 20_000 if "ab" in stops[0] else "a" * 40_000
    started = time.perf_counter()
    for i in range(0, len(text), 4):
        search.push(text[i : i + 4])
    assert (time.perf_counter() - started) / 10_000 < 200e-6
