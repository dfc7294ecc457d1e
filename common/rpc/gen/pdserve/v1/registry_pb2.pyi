from common.rpc.gen.pdserve.v1 import work_pb2 as _work_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerStatus(_message.Message):
    __slots__ = ("profile", "load", "goodbye")
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    profile: WorkerProfile
    load: WorkerLoad
    goodbye: Goodbye
    def __init__(self, profile: _Optional[_Union[WorkerProfile, _Mapping]] = ..., load: _Optional[_Union[WorkerLoad, _Mapping]] = ..., goodbye: _Optional[_Union[Goodbye, _Mapping]] = ...) -> None: ...

class AnnounceRequest(_message.Message):
    __slots__ = ("role",)
    ROLE_FIELD_NUMBER: _ClassVar[int]
    role: str
    def __init__(self, role: _Optional[str] = ...) -> None: ...

class AnnounceResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Goodbye(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WorkerProfile(_message.Message):
    __slots__ = ("worker_id", "role", "address", "compatibility", "device", "total_pages", "max_running", "version", "local_prefill", "chunk_tokens", "local_prefill_tokens", "max_requests")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    COMPATIBILITY_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_PAGES_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LOCAL_PREFILL_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOCAL_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    role: str
    address: str
    compatibility: _work_pb2.Compatibility
    device: str
    total_pages: int
    max_running: int
    version: str
    local_prefill: bool
    chunk_tokens: int
    local_prefill_tokens: int
    max_requests: int
    def __init__(self, worker_id: _Optional[str] = ..., role: _Optional[str] = ..., address: _Optional[str] = ..., compatibility: _Optional[_Union[_work_pb2.Compatibility, _Mapping]] = ..., device: _Optional[str] = ..., total_pages: _Optional[int] = ..., max_running: _Optional[int] = ..., version: _Optional[str] = ..., local_prefill: _Optional[bool] = ..., chunk_tokens: _Optional[int] = ..., local_prefill_tokens: _Optional[int] = ..., max_requests: _Optional[int] = ...) -> None: ...

class WorkerLoad(_message.Message):
    __slots__ = ("running", "waiting", "queued_tokens", "free_pages", "held_pages", "cached_pages", "quarantined_pages", "draining")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FREE_PAGES_FIELD_NUMBER: _ClassVar[int]
    HELD_PAGES_FIELD_NUMBER: _ClassVar[int]
    CACHED_PAGES_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_PAGES_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    queued_tokens: int
    free_pages: int
    held_pages: int
    cached_pages: int
    quarantined_pages: int
    draining: bool
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., queued_tokens: _Optional[int] = ..., free_pages: _Optional[int] = ..., held_pages: _Optional[int] = ..., cached_pages: _Optional[int] = ..., quarantined_pages: _Optional[int] = ..., draining: _Optional[bool] = ...) -> None: ...

class RouterDirective(_message.Message):
    __slots__ = ("accepted", "drain", "undrain", "goodbye")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    UNDRAIN_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    accepted: Accepted
    drain: Drain
    undrain: Undrain
    goodbye: Goodbye
    def __init__(self, accepted: _Optional[_Union[Accepted, _Mapping]] = ..., drain: _Optional[_Union[Drain, _Mapping]] = ..., undrain: _Optional[_Union[Undrain, _Mapping]] = ..., goodbye: _Optional[_Union[Goodbye, _Mapping]] = ...) -> None: ...

class Accepted(_message.Message):
    __slots__ = ("router_epoch",)
    ROUTER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    router_epoch: int
    def __init__(self, router_epoch: _Optional[int] = ...) -> None: ...

class Drain(_message.Message):
    __slots__ = ("grace_ms", "stay")
    GRACE_MS_FIELD_NUMBER: _ClassVar[int]
    STAY_FIELD_NUMBER: _ClassVar[int]
    grace_ms: int
    stay: bool
    def __init__(self, grace_ms: _Optional[int] = ..., stay: _Optional[bool] = ...) -> None: ...

class Undrain(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainWorkerRequest(_message.Message):
    __slots__ = ("worker_id", "grace_ms", "exit")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    GRACE_MS_FIELD_NUMBER: _ClassVar[int]
    EXIT_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    grace_ms: int
    exit: bool
    def __init__(self, worker_id: _Optional[str] = ..., grace_ms: _Optional[int] = ..., exit: _Optional[bool] = ...) -> None: ...

class DrainWorkerResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class UndrainWorkerRequest(_message.Message):
    __slots__ = ("worker_id",)
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    def __init__(self, worker_id: _Optional[str] = ...) -> None: ...

class UndrainWorkerResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
