from common.rpc.gen.pdserve.v1 import generation_pb2 as _generation_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkKey(_message.Message):
    __slots__ = ("router_epoch", "uid", "attempt")
    ROUTER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    UID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    router_epoch: int
    uid: int
    attempt: int
    def __init__(self, router_epoch: _Optional[int] = ..., uid: _Optional[int] = ..., attempt: _Optional[int] = ...) -> None: ...

class Req(_message.Message):
    __slots__ = ("key", "input_ids", "prompt_len", "cached_len", "output_len", "sampling", "completion", "n", "logprobs", "priority", "deadline_ms", "request_id", "traceparent")
    KEY_FIELD_NUMBER: _ClassVar[int]
    INPUT_IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LEN_FIELD_NUMBER: _ClassVar[int]
    CACHED_LEN_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_LEN_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    key: WorkKey
    input_ids: bytes
    prompt_len: int
    cached_len: int
    output_len: int
    sampling: _generation_pb2.SamplingParams
    completion: int
    n: int
    logprobs: int
    priority: int
    deadline_ms: int
    request_id: str
    traceparent: str
    def __init__(self, key: _Optional[_Union[WorkKey, _Mapping]] = ..., input_ids: _Optional[bytes] = ..., prompt_len: _Optional[int] = ..., cached_len: _Optional[int] = ..., output_len: _Optional[int] = ..., sampling: _Optional[_Union[_generation_pb2.SamplingParams, _Mapping]] = ..., completion: _Optional[int] = ..., n: _Optional[int] = ..., logprobs: _Optional[int] = ..., priority: _Optional[int] = ..., deadline_ms: _Optional[int] = ..., request_id: _Optional[str] = ..., traceparent: _Optional[str] = ...) -> None: ...

class Token(_message.Message):
    __slots__ = ("uid", "attempt", "index", "token_id", "logprob", "top_ids", "top_logprobs", "finish", "cached_tokens")
    UID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    uid: int
    attempt: int
    index: int
    token_id: int
    logprob: float
    top_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    finish: _generation_pb2.FinishReason
    cached_tokens: int
    def __init__(self, uid: _Optional[int] = ..., attempt: _Optional[int] = ..., index: _Optional[int] = ..., token_id: _Optional[int] = ..., logprob: _Optional[float] = ..., top_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ..., finish: _Optional[_Union[_generation_pb2.FinishReason, str]] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("uid", "attempt", "code", "message", "retryable", "handed_back")
    UID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRYABLE_FIELD_NUMBER: _ClassVar[int]
    HANDED_BACK_FIELD_NUMBER: _ClassVar[int]
    uid: int
    attempt: int
    code: int
    message: str
    retryable: bool
    handed_back: bool
    def __init__(self, uid: _Optional[int] = ..., attempt: _Optional[int] = ..., code: _Optional[int] = ..., message: _Optional[str] = ..., retryable: _Optional[bool] = ..., handed_back: _Optional[bool] = ...) -> None: ...

class Compatibility(_message.Message):
    __slots__ = ("fingerprint", "dtype", "page_size", "max_context", "num_layers", "num_kv_heads", "head_dim", "pool_layout", "protocol_version")
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    POOL_LAYOUT_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    fingerprint: str
    dtype: str
    page_size: int
    max_context: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    pool_layout: str
    protocol_version: int
    def __init__(self, fingerprint: _Optional[str] = ..., dtype: _Optional[str] = ..., page_size: _Optional[int] = ..., max_context: _Optional[int] = ..., num_layers: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., pool_layout: _Optional[str] = ..., protocol_version: _Optional[int] = ...) -> None: ...
