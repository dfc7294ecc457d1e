"""How long a simulated step takes: the measured H200 figures, and what a profile file may say."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.engine.sim.profile import SimProfile
from common.errors import StartError

MS = 1e-3


@pytest.mark.parametrize(("batch", "ms"), [(1, 4.91), (8, 5.38), (32, 6.30), (64, 7.70), (128, 10.20), (256, 16.00)])
def test_a_default_decode_step_takes_what_llama_3_8b_took_at_a_context_of_1024(batch: int, ms: float) -> None:
    assert SimProfile().decode_seconds([1024] * batch) == pytest.approx(ms * MS, rel=0.03)


@pytest.mark.parametrize(("tokens", "tflops"), [(512, 546), (2048, 587), (8192, 588)])
def test_a_default_prefill_step_takes_what_llama_3_8b_took(tokens: int, tflops: float) -> None:
    """7.0e9 weights in the layers, 2 operations each, and 4 * 4096 * 32 operations per pair of a query and a key."""
    operations = 14.0e9 * tokens + 4 * 4096 * 32 * tokens**2 / 2
    assert SimProfile().prefill_seconds([(0, tokens)]) == pytest.approx(operations / (tflops * 1e12), rel=0.01)


def test_a_chunk_attends_to_what_came_before_it() -> None:
    profile = SimProfile(prefill_base=0.0)
    halves = profile.prefill_seconds([(0, 1000)]) + profile.prefill_seconds([(1000, 2000)])
    assert halves == pytest.approx(profile.prefill_seconds([(0, 2000)]))
    assert profile.prefill_seconds([(0, 1000), (1000, 2000)]) == pytest.approx(halves)


def test_a_file_changes_what_it_names(tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text('{"decode_base": 0.001, "pool_tokens": 640}')
    assert SimProfile.read(tmp_path / "p.json") == SimProfile(decode_base=0.001, pool_tokens=640)
    assert SimProfile.read(None) == SimProfile()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[1]", "must be an object with some of prefill_base, .* got an array or a value"),
        ('{"decode": 1}', "must be an object with some of .* got decode"),
        ('{"decode_base": -1}', "decode_base must be a number and at least 0, got -1"),
        ('{"decode_base": "fast"}', "decode_base must be a number and at least 0, got 'fast'"),
        ('{"pool_tokens": 1.5}', "pool_tokens must be a whole number and at least 0, got 1.5"),
    ],
)
def test_a_file_that_cannot_be_meant_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(StartError, match=message) as caught:
        SimProfile.read(tmp_path / "p.json")
    assert str(tmp_path / "p.json") in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="cannot read .*: No such file"):
        SimProfile.read(tmp_path / "none.json")
