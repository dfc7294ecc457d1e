from common.rpc.gen.pdserve.v1 import prefill_pb2 as _prefill_pb2
from common.rpc.gen.pdserve.v1 import work_pb2 as _work_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DecodeSessionRequest(_message.Message):
    __slots__ = ("hello", "cancel", "prefill", "inquire")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    INQUIRE_FIELD_NUMBER: _ClassVar[int]
    hello: _prefill_pb2.SessionHello
    cancel: _prefill_pb2.CancelWork
    prefill: Prefill
    inquire: Inquire
    def __init__(self, hello: _Optional[_Union[_prefill_pb2.SessionHello, _Mapping]] = ..., cancel: _Optional[_Union[_prefill_pb2.CancelWork, _Mapping]] = ..., prefill: _Optional[_Union[Prefill, _Mapping]] = ..., inquire: _Optional[_Union[Inquire, _Mapping]] = ...) -> None: ...

class Inquire(_message.Message):
    __slots__ = ("uid", "attempt")
    UID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    uid: int
    attempt: int
    def __init__(self, uid: _Optional[int] = ..., attempt: _Optional[int] = ...) -> None: ...

class Prefill(_message.Message):
    __slots__ = ("req",)
    REQ_FIELD_NUMBER: _ClassVar[int]
    req: _work_pb2.Req
    def __init__(self, req: _Optional[_Union[_work_pb2.Req, _Mapping]] = ...) -> None: ...

class DecodeSessionResponse(_message.Message):
    __slots__ = ("opened", "step", "retracted", "failure", "started", "holding")
    OPENED_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    RETRACTED_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    HOLDING_FIELD_NUMBER: _ClassVar[int]
    opened: _prefill_pb2.SessionOpened
    step: Step
    retracted: Retracted
    failure: _work_pb2.Failure
    started: _prefill_pb2.PrefillStarted
    holding: Holding
    def __init__(self, opened: _Optional[_Union[_prefill_pb2.SessionOpened, _Mapping]] = ..., step: _Optional[_Union[Step, _Mapping]] = ..., retracted: _Optional[_Union[Retracted, _Mapping]] = ..., failure: _Optional[_Union[_work_pb2.Failure, _Mapping]] = ..., started: _Optional[_Union[_prefill_pb2.PrefillStarted, _Mapping]] = ..., holding: _Optional[_Union[Holding, _Mapping]] = ...) -> None: ...

class Holding(_message.Message):
    __slots__ = ("uid", "attempt", "committed")
    UID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    uid: int
    attempt: int
    committed: bool
    def __init__(self, uid: _Optional[int] = ..., attempt: _Optional[int] = ..., committed: _Optional[bool] = ...) -> None: ...

class Step(_message.Message):
    __slots__ = ("tokens",)
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedCompositeFieldContainer[_work_pb2.Token]
    def __init__(self, tokens: _Optional[_Iterable[_Union[_work_pb2.Token, _Mapping]]] = ...) -> None: ...

class Retracted(_message.Message):
    __slots__ = ("uid", "attempt")
    UID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    uid: int
    attempt: int
    def __init__(self, uid: _Optional[int] = ..., attempt: _Optional[int] = ...) -> None: ...

class PairRequest(_message.Message):
    __slots__ = ("prefill_worker", "compatibility")
    PREFILL_WORKER_FIELD_NUMBER: _ClassVar[int]
    COMPATIBILITY_FIELD_NUMBER: _ClassVar[int]
    prefill_worker: str
    compatibility: _work_pb2.Compatibility
    def __init__(self, prefill_worker: _Optional[str] = ..., compatibility: _Optional[_Union[_work_pb2.Compatibility, _Mapping]] = ...) -> None: ...

class PairResponse(_message.Message):
    __slots__ = ("decode_worker", "pair_id", "shm_socket", "page_bytes", "pool_pages", "cuda_pool")
    DECODE_WORKER_FIELD_NUMBER: _ClassVar[int]
    PAIR_ID_FIELD_NUMBER: _ClassVar[int]
    SHM_SOCKET_FIELD_NUMBER: _ClassVar[int]
    PAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    POOL_PAGES_FIELD_NUMBER: _ClassVar[int]
    CUDA_POOL_FIELD_NUMBER: _ClassVar[int]
    decode_worker: str
    pair_id: str
    shm_socket: str
    page_bytes: int
    pool_pages: int
    cuda_pool: CudaPool
    def __init__(self, decode_worker: _Optional[str] = ..., pair_id: _Optional[str] = ..., shm_socket: _Optional[str] = ..., page_bytes: _Optional[int] = ..., pool_pages: _Optional[int] = ..., cuda_pool: _Optional[_Union[CudaPool, _Mapping]] = ...) -> None: ...

class CudaPool(_message.Message):
    __slots__ = ("handle", "offset", "pool_bytes", "device_uuid", "nonce", "nonce_offset", "socket")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    POOL_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_UUID_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    NONCE_OFFSET_FIELD_NUMBER: _ClassVar[int]
    SOCKET_FIELD_NUMBER: _ClassVar[int]
    handle: bytes
    offset: int
    pool_bytes: int
    device_uuid: bytes
    nonce: bytes
    nonce_offset: int
    socket: str
    def __init__(self, handle: _Optional[bytes] = ..., offset: _Optional[int] = ..., pool_bytes: _Optional[int] = ..., device_uuid: _Optional[bytes] = ..., nonce: _Optional[bytes] = ..., nonce_offset: _Optional[int] = ..., socket: _Optional[str] = ...) -> None: ...

class ReserveRequest(_message.Message):
    __slots__ = ("pair_id", "req", "transport", "verify")
    PAIR_ID_FIELD_NUMBER: _ClassVar[int]
    REQ_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    VERIFY_FIELD_NUMBER: _ClassVar[int]
    pair_id: str
    req: _work_pb2.Req
    transport: str
    verify: bool
    def __init__(self, pair_id: _Optional[str] = ..., req: _Optional[_Union[_work_pb2.Req, _Mapping]] = ..., transport: _Optional[str] = ..., verify: _Optional[bool] = ...) -> None: ...

class ReserveResponse(_message.Message):
    __slots__ = ("ticket", "page_ids", "prefix_len", "lease_ms")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    PAGE_IDS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_LEN_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    ticket: str
    page_ids: _containers.RepeatedScalarFieldContainer[int]
    prefix_len: int
    lease_ms: int
    def __init__(self, ticket: _Optional[str] = ..., page_ids: _Optional[_Iterable[int]] = ..., prefix_len: _Optional[int] = ..., lease_ms: _Optional[int] = ...) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("tickets",)
    TICKETS_FIELD_NUMBER: _ClassVar[int]
    tickets: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, tickets: _Optional[_Iterable[str]] = ...) -> None: ...

class RenewResponse(_message.Message):
    __slots__ = ("lost",)
    LOST_FIELD_NUMBER: _ClassVar[int]
    lost: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, lost: _Optional[_Iterable[str]] = ...) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("ticket", "first_tokens", "pages_sent", "page_crc32", "computed_at_ns")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PAGES_SENT_FIELD_NUMBER: _ClassVar[int]
    PAGE_CRC32_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_AT_NS_FIELD_NUMBER: _ClassVar[int]
    ticket: str
    first_tokens: _containers.RepeatedCompositeFieldContainer[_work_pb2.Token]
    pages_sent: int
    page_crc32: _containers.RepeatedScalarFieldContainer[int]
    computed_at_ns: int
    def __init__(self, ticket: _Optional[str] = ..., first_tokens: _Optional[_Iterable[_Union[_work_pb2.Token, _Mapping]]] = ..., pages_sent: _Optional[int] = ..., page_crc32: _Optional[_Iterable[int]] = ..., computed_at_ns: _Optional[int] = ...) -> None: ...

class CommitResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("ticket", "drained")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    DRAINED_FIELD_NUMBER: _ClassVar[int]
    ticket: str
    drained: bool
    def __init__(self, ticket: _Optional[str] = ..., drained: _Optional[bool] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
