"""The nouns of common/core.py: lengths, identity, the current batch; and their way over the wire and back."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common import core, wire, worker_wire
from common.core import Batch, Context, Req, SamplingParams
from common.errors import Incompatible
from common.rpc.gen.pdserve.v1 import work_pb2
from common.work import MAX_COMPLETIONS, Compatibility, FinishReason, PageCounts, TokenOut, WorkerLoad, WorkerProfile, WorkFailure
from common.work_key import WorkKey

ROOT = Path(__file__).resolve().parents[2]

PRINTED = """\
at admission (2 hit) cached_len=2  device_len=6  extend_len=4  remain_len=3  can_decode=True
after prefill      cached_len=6  device_len=7  extend_len=1  remain_len=2  can_decode=True
after decode 1     cached_len=7  device_len=8  extend_len=1  remain_len=1  can_decode=True
after decode 2     cached_len=8  device_len=9  extend_len=1  remain_len=0  can_decode=False
final input_ids: [0, 1, 2, 3, 4, 5, 100, 100, 100]
"""


def make_req(prompt_len: int = 6, max_tokens: int = 3, cached_len: int = 2) -> Req:
    ids = torch.arange(prompt_len, dtype=torch.int32)
    return Req(ids, 0, cached_len, max_tokens, 0, SamplingParams(max_tokens=max_tokens), None)


def test_the_example_prints_the_lengths_of_a_request() -> None:
    run = subprocess.run([sys.executable, "examples/req_lengths.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout == PRINTED


def test_core_is_importable_without_torch() -> None:
    code = "import sys, common.core, common.wire, common.work, common.errors; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


@pytest.mark.parametrize("cached_len", [-1, 6, 7])
def test_a_req_always_has_a_token_to_compute(cached_len: int) -> None:
    with pytest.raises(AssertionError):
        make_req(cached_len=cached_len)


def test_reqs_with_equal_fields_are_two_members_of_a_set() -> None:
    assert len({make_req(), make_req()}) == 2


def test_chunks_move_cached_len_to_the_end_of_the_prompt() -> None:
    req = make_req(prompt_len=10, cached_len=0)
    sizes: list[int] = []
    while not (sizes and req.is_last_chunk):
        if sizes:
            req.complete_chunk()
        sizes.append(req.take_chunk(4))
    req.complete_one()
    assert sizes == [4, 4, 2] and (req.cached_len, req.device_len, req.remain_len) == (10, 11, 2)


@pytest.mark.parametrize(
    ("params", "greedy"),
    [
        (SamplingParams(), True),
        (SamplingParams(temperature=1.0), False),
        (SamplingParams(temperature=1.0, top_k=1), True),
        (SamplingParams(temperature=0.0, top_p=0.9), False),
        (SamplingParams(temperature=-1.0), True),
    ],
)
def test_is_greedy(params: SamplingParams, greedy: bool) -> None:
    assert params.is_greedy is greedy


def test_the_current_batch_exists_inside_forward_batch_only() -> None:
    ctx, batch = Context(page_size=4), Batch([make_req()], "prefill")
    with ctx.forward_batch(batch):
        assert ctx.batch is batch and batch.is_prefill and not batch.is_decode and batch.size == 1
        with pytest.raises(AssertionError, match="Nested"), ctx.forward_batch(batch):
            pass
    with pytest.raises(AssertionError, match="No active batch"):
        _ = ctx.batch


def test_the_global_context_is_set_once() -> None:
    core.reset_global_ctx()
    with pytest.raises(AssertionError, match="not set"):
        core.get_global_ctx()
    ctx = Context(page_size=4)
    core.set_global_ctx(ctx)
    try:
        assert core.get_global_ctx() is ctx
        with pytest.raises(AssertionError, match="already set"):
            core.set_global_ctx(ctx)
    finally:
        core.reset_global_ctx()


def float32s(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high, width=32)


SAMPLING = st.builds(
    SamplingParams,
    temperature=float32s(0, 100),
    top_k=st.integers(-1, 2**31 - 1),
    top_p=float32s(0.125, 1),
    ignore_eos=st.booleans(),
    max_tokens=st.integers(1, 2**32 - 1),
    min_p=float32s(0, 1),
    repetition_penalty=float32s(0.125, 2),
    frequency_penalty=float32s(-2, 2),
    presence_penalty=float32s(-2, 2),
    seed=st.none() | st.integers(0, 2**64 - 1),
    min_tokens=st.integers(0, 2**32 - 1),
    stop_token_ids=st.lists(st.integers(0, 2**31 - 1), max_size=4).map(tuple),
    logit_bias=st.dictionaries(st.integers(0, 2**31 - 1), float32s(-100, 100), max_size=4),
)


@st.composite
def reqs(draw: st.DrawFn) -> Req:
    ids = draw(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=50))
    return Req(
        input_ids=torch.tensor(ids, dtype=torch.int32),
        table_idx=-1,
        cached_len=draw(st.integers(0, len(ids) - 1)),
        output_len=draw(st.integers(0, 2**31)),
        uid=draw(st.integers(0, 2**64 - MAX_COMPLETIONS)),
        sampling_params=draw(SAMPLING),
        cache_handle=None,
        prompt_len=draw(st.integers(1, len(ids))),
        router_epoch=draw(st.integers(0, 2**64 - 1)),
        attempt=draw(st.integers(1, 2**32 - 1)),
        completion=draw(st.integers(0, 100)),
        n=draw(st.integers(1, MAX_COMPLETIONS)),
        logprobs=draw(st.none() | st.integers(0, 20)),
        priority=draw(st.integers(-(2**31), 2**31 - 1)),
        request_id=draw(st.text(st.characters(exclude_categories=["Cs"]), max_size=20)),
    )


@given(req=reqs())
def test_a_req_survives_the_wire_in_both_directions(req: Req) -> None:
    pb = wire.req_to_pb(req)
    back = wire.req_from_pb(work_pb2.Req.FromString(pb.SerializeToString()))
    assert back.input_ids.dtype == torch.int32 and back.input_ids.is_cpu
    mine, other = vars(req) | {"input_ids": req.input_ids.tolist()}, vars(back) | {"input_ids": back.input_ids.tolist()}
    assert mine == other
    assert wire.req_to_pb(back) == pb


@pytest.mark.parametrize(
    "pb",
    [
        work_pb2.Req(input_ids=b"\0\0\0", prompt_len=1),
        work_pb2.Req(input_ids=b"", prompt_len=0),
        work_pb2.Req(input_ids=b"\0" * 8, prompt_len=3),
        work_pb2.Req(input_ids=b"\0" * 8, prompt_len=0),
        work_pb2.Req(input_ids=b"\0" * 8, prompt_len=2, cached_len=2),
    ],
)
def test_a_req_that_breaks_its_invariants_is_refused_at_the_edge(pb: work_pb2.Req) -> None:
    with pytest.raises(ValueError):
        wire.req_from_pb(pb)


KEYS = st.builds(WorkKey, st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1))


@given(
    token=st.builds(
        TokenOut,
        key=KEYS,
        index=st.integers(0, 2**32 - 1),
        token_id=st.integers(0, 2**32 - 1),
        logprob=st.none() | float32s(-100, 0),
        top=st.lists(st.tuples(st.integers(0, 2**32 - 1), float32s(-100, 0)), max_size=3).map(tuple),
        finish=st.none() | st.sampled_from(FinishReason),
        cached_tokens=st.none() | st.integers(0, 2**32 - 1),
    )
)
def test_a_token_survives_the_wire(token: TokenOut) -> None:
    assert wire.token_from_pb(wire.token_to_pb(token), token.key.router_epoch) == token


@given(failure=st.builds(WorkFailure, KEYS, st.integers(0, 16), st.text(st.characters(exclude_categories=["Cs"])), st.booleans()))
def test_a_failure_survives_the_wire(failure: WorkFailure) -> None:
    assert wire.failure_from_pb(wire.failure_to_pb(failure), failure.key.router_epoch) == failure


COMPATIBILITY = Compatibility("abc", "float32", 16, 2048, 2, 2, 16)


def test_profile_and_load_survive_the_wire() -> None:
    profile = WorkerProfile("decode-1", "decode", "127.0.0.1:1", COMPATIBILITY, "cpu", 64, 16, "0.1", True, 256, 32, 100)
    load = WorkerLoad(1, 2, 3, PageCounts(4, 5, 6, 7, 22), draining=True)
    assert worker_wire.profile_from_pb(worker_wire.profile_to_pb(profile)) == profile
    assert worker_wire.load_from_pb(worker_wire.load_to_pb(load)) == load


@pytest.mark.parametrize(
    ("field", "value"), [("page_size", 32), ("dtype", "bfloat16"), ("fingerprint", "other"), ("protocol_version", 9)]
)
def test_cmp_01_an_incompatibility_names_the_field_and_both_values(field: str, value: object) -> None:
    theirs = Compatibility(**(vars(COMPATIBILITY) | {field: value}))
    with pytest.raises(Incompatible) as caught:
        COMPATIBILITY.check(theirs, our_name="prefill-1", their_name="decode-1")
    assert all(
        part in str(caught.value) for part in (field, repr(value), repr(getattr(COMPATIBILITY, field)), "prefill-1", "decode-1")
    )
