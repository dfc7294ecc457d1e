"""What is said of requests to protobuf and back, in pairs; past this module and common/worker_wire.py nothing sees a pb2 of the
internal services.

Token ids travel as little-endian int32 bytes: as repeated integers, 32k ids cost milliseconds.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence

from common.core import Req, SamplingParams
from common.rpc.gen.pdserve.v1 import generation_pb2, work_pb2
from common.token_ids import MakeIds, tensor_ids
from common.work import MAX_COMPLETIONS, FinishReason, TokenOut, WorkFailure
from common.work_key import WorkKey

assert array("i").itemsize == 4


def ids_to_bytes(ids: Sequence[int]) -> bytes:
    """Token ids as little-endian int32."""
    packed = array("i", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def ids_from_bytes(data: bytes) -> array[int]:
    """Raises ValueError unless data is whole int32s."""
    packed = array("i")
    packed.frombytes(data)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed


def key_to_pb(key: WorkKey) -> work_pb2.WorkKey:
    return work_pb2.WorkKey(router_epoch=key.router_epoch, uid=key.uid, attempt=key.attempt)


def key_from_pb(pb: work_pb2.WorkKey) -> WorkKey:
    return WorkKey(pb.router_epoch, pb.uid, pb.attempt)


def sampling_to_pb(params: SamplingParams) -> generation_pb2.SamplingParams:
    """Every field set, except a seed not yet drawn."""
    return generation_pb2.SamplingParams(**vars(params))


def sampling_from_pb(pb: generation_pb2.SamplingParams) -> SamplingParams:
    """Unset optional fields take the defaults of SamplingParams."""
    optional = (
        "temperature",
        "top_k",
        "top_p",
        "max_tokens",
        "min_p",
        "repetition_penalty",
        "frequency_penalty",
        "presence_penalty",
        "seed",
    )
    return SamplingParams(
        **{name: getattr(pb, name) for name in optional if pb.HasField(name)},
        ignore_eos=pb.ignore_eos,
        min_tokens=pb.min_tokens,
        stop_token_ids=tuple(pb.stop_token_ids),
        logit_bias=dict(pb.logit_bias),
    )


def req_pb(
    *,
    key: WorkKey,
    input_ids: bytes,
    prompt_len: int,
    output_len: int,
    sampling: SamplingParams,
    cached_len: int = 0,
    completion: int = 0,
    n: int = 1,
    logprobs: int | None = None,
    priority: int = 0,
    request_id: str = "",
    traceparent: str = "",
) -> work_pb2.Req:
    """A Req on the wire from plain values, for the router, which has no tensors. input_ids: see ids_to_bytes."""
    return work_pb2.Req(
        key=key_to_pb(key),
        input_ids=input_ids,
        prompt_len=prompt_len,
        cached_len=cached_len,
        output_len=output_len,
        sampling=sampling_to_pb(sampling),
        completion=completion,
        n=n,
        logprobs=logprobs,
        priority=priority,
        request_id=request_id,
        traceparent=traceparent,
    )


def req_to_pb(req: Req) -> work_pb2.Req:
    """Without table_idx and cache_handle, which mean something to one worker only. output_len is what remains to be generated."""
    return req_pb(
        key=req.key,
        input_ids=ids_to_bytes(req.input_ids.tolist()),
        prompt_len=req.prompt_len,
        output_len=req.max_device_len - len(req.input_ids),
        sampling=req.sampling_params,
        cached_len=req.cached_len,
        completion=req.completion,
        n=req.n,
        logprobs=req.logprobs,
        priority=req.priority,
        request_id=req.request_id,
        traceparent=req.traceparent,
    )


def completions_of(pb: work_pb2.Req) -> range:
    """Offsets of its completions; of a request with too many, as many as there may be: one could count for hours."""
    return range(min(max(1, pb.n), MAX_COMPLETIONS, 2**64 - pb.key.uid))


def req_from_pb(pb: work_pb2.Req, *, make_ids: MakeIds = tensor_ids) -> Req:
    """table_idx is -1 and cache_handle None until a worker gives it a row. Raises ValueError on broken invariants."""
    ids = ids_from_bytes(pb.input_ids)
    if not 0 < pb.prompt_len <= len(ids) or not pb.cached_len < len(ids):
        raise ValueError(f"req: prompt_len {pb.prompt_len} and cached_len {pb.cached_len} do not fit {len(ids)} input ids")
    if len(completions_of(pb)) != max(1, pb.n):
        raise ValueError(f"req: n must be at most {MAX_COMPLETIONS}, and fit the uid {pb.key.uid}, got {pb.n}")
    return Req(
        input_ids=make_ids(ids),
        table_idx=-1,
        cached_len=pb.cached_len,
        output_len=pb.output_len,
        uid=pb.key.uid,
        sampling_params=sampling_from_pb(pb.sampling),
        cache_handle=None,
        prompt_len=pb.prompt_len,
        router_epoch=pb.key.router_epoch,
        attempt=pb.key.attempt,
        completion=pb.completion,
        n=max(1, pb.n),
        logprobs=pb.logprobs if pb.HasField("logprobs") else None,
        priority=pb.priority,
        request_id=pb.request_id,
        traceparent=pb.traceparent,
    )


def token_to_pb(token: TokenOut) -> work_pb2.Token:
    pb = work_pb2.Token(
        uid=token.key.uid,
        attempt=token.key.attempt,
        index=token.index,
        token_id=token.token_id,
        logprob=token.logprob,
        cached_tokens=token.cached_tokens,
    )
    for token_id, logprob in token.top:
        pb.top_ids.append(token_id)
        pb.top_logprobs.append(logprob)
    if token.finish is not None:
        pb.finish = int(token.finish)  # type: ignore[assignment]  # the generated stub knows no plain ints
    return pb


def token_from_pb(pb: work_pb2.Token, router_epoch: int) -> TokenOut:
    return TokenOut(
        key=WorkKey(router_epoch, pb.uid, pb.attempt),
        index=pb.index,
        token_id=pb.token_id,
        logprob=pb.logprob if pb.HasField("logprob") else None,
        top=tuple(zip(pb.top_ids, pb.top_logprobs, strict=True)) if pb.top_ids else (),
        finish=FinishReason(pb.finish) if pb.finish else None,
        cached_tokens=pb.cached_tokens if pb.HasField("cached_tokens") else None,
    )


def failure_to_pb(failure: WorkFailure) -> work_pb2.Failure:
    return work_pb2.Failure(
        uid=failure.key.uid,
        attempt=failure.key.attempt,
        code=failure.code,
        message=failure.message,
        retryable=failure.retryable,
        handed_back=failure.handed_back,
    )


def failure_from_pb(pb: work_pb2.Failure, router_epoch: int) -> WorkFailure:
    return WorkFailure(WorkKey(router_epoch, pb.uid, pb.attempt), pb.code, pb.message, pb.retryable, pb.handed_back)
