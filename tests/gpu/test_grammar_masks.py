"""Masks that depend on the token before: computed on the host while the next step's layers are, uploaded before it samples."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from common.core import Req, SamplingParams
from tests.gpu.sampling import CUDA, VOCAB, Level, Rig, tokens
from tests.helpers.sampling import make_req, spread_logits

from decode_worker.grammar_masks import GrammarMasks  # isort: skip

CLASSES = 7
STEPS = 40


class Rounds:
    """A grammar in which a token of class c (its id modulo CLASSES) is followed by one of class c + 1. seen: by request, the
    newest token of every step."""

    def __init__(self, vocab: int) -> None:
        self.vocab = vocab
        self.covered: list[Req] = []
        self.seen: dict[Req, list[int]] = {}

    def cover(self, req: Req) -> None:
        self.covered.append(req)
        self.seen[req] = []

    def covers(self, req: Req) -> bool:
        return any(req is other for other in self.covered)

    def next_mask(self, req: Req, token: int | None) -> NDArray[np.int32]:
        newest = int(req.input_ids[-1]) if token is None else token
        self.seen[req].append(newest)
        allowed = np.zeros(-(-self.vocab // 32) * 32, dtype=np.uint8)
        allowed[(newest + 1) % CLASSES : self.vocab : CLASSES] = 1
        return np.packbits(allowed, bitorder="little").view(np.int32)


class Made:
    """A step whose tokens are known."""

    def __init__(self, made: Mapping[Req, int]) -> None:
        self._made = made

    def tokens(self) -> Mapping[Req, int]:
        return self._made


def test_a_mask_follows_the_newest_token_wherever_it_is_and_touches_no_other_row() -> None:
    rig, grammar = Rig(), Rounds(VOCAB)
    reqs = [make_req(SamplingParams(), prompt=[5]), make_req(SamplingParams()), make_req(SamplingParams(), prompt=[5])]
    for slot, req in enumerate(reqs):
        req.table_idx = slot
    grammar.cover(reqs[0])
    grammar.cover(reqs[2])
    reqs[2].complete_one()  # Its token is on the device alone.
    masks = GrammarMasks(grammar, rig.state)
    assert masks.level_of(reqs) is Level.FULL and masks.level_of(reqs[1:2]) is Level.GREEDY
    rig.load(reqs)
    logits = spread_logits(3, vocab=VOCAB)
    plain = tokens(rig.step(logits, reqs, level=Level.FULL))
    masks.upload(reqs, Made({reqs[2]: 11}))
    masked = tokens(rig.step(logits, reqs, level=Level.FULL))
    assert grammar.seen == {reqs[0]: [5], reqs[2]: [11]}
    for row, newest in ((0, 5), (2, 11)):
        allowed = torch.arange((newest + 1) % CLASSES, VOCAB, CLASSES)
        assert masked[row] == int(allowed[logits[row, allowed].argmax()])
    assert masked[1] == plain[1]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not CUDA:
        pytest.skip("this engine runs on a GPU only")
    pytest.importorskip("flashinfer", reason="flashinfer is not installed")
    from tests.helpers.tiny_model import make_tiny_model

    shape: dict[str, Any] = {"hidden": 256, "heads": 8, "kv_heads": 2, "head_dim": 64, "layers": 3, "vocab": 700}
    return make_tiny_model(tmp_path_factory.mktemp("model"), dtype=torch.bfloat16, max_context=2048, **shape)


@pytest.mark.gpu
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("captured", [True, False])
def test_steps_with_masks_obey_them_and_leave_the_others_tokens_alone(model: Path, ahead: bool, captured: bool) -> None:
    from common.batch_sizes import BatchSizes
    from tests.gpu.test_engine import gpu_engine, prompts
    from tests.helpers.engine_driver import EngineDriver

    sampled = SamplingParams(temperature=0.9, seed=3, max_tokens=STEPS, ignore_eos=True)
    greedy = SamplingParams(max_tokens=STEPS, ignore_eos=True)
    outputs = []
    for has_grammar in (False, True):
        grammar = Rounds(700)
        with gpu_engine(model, sizes=BatchSizes((4,)) if captured else BatchSizes(), masks=grammar) as runner:
            driver = EngineDriver(runner)
            params = (greedy, sampled, greedy, sampled)
            reqs = [driver.add(ids, max_tokens=STEPS, params=own) for ids, own in zip(prompts(4), params, strict=True)]
            driver.prefill(reqs)
            if has_grammar:
                grammar.cover(reqs[0])
                grammar.cover(reqs[1])
            driver.decode_all(reqs, ahead=ahead)
            outputs.append([[one.token_id for one in driver.sampled[req]] for req in reqs])
    free, bound = outputs
    assert bound[2:] == free[2:]
    for own, req in zip(bound[:2], grammar.covered, strict=True):
        assert len(own) == STEPS and grammar.seen[req] == own[:-1]
        assert all((after - before) % CLASSES == 1 for before, after in itertools.pairwise(own))
