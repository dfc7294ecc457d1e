from common.rpc.gen.pdserve.v1 import work_pb2 as _work_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PrefillSessionRequest(_message.Message):
    __slots__ = ("hello", "submit", "cancel")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    hello: SessionHello
    submit: Submit
    cancel: CancelWork
    def __init__(self, hello: _Optional[_Union[SessionHello, _Mapping]] = ..., submit: _Optional[_Union[Submit, _Mapping]] = ..., cancel: _Optional[_Union[CancelWork, _Mapping]] = ...) -> None: ...

class SessionHello(_message.Message):
    __slots__ = ("router_epoch",)
    ROUTER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    router_epoch: int
    def __init__(self, router_epoch: _Optional[int] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("req", "decode_address", "decode_worker")
    REQ_FIELD_NUMBER: _ClassVar[int]
    DECODE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    DECODE_WORKER_FIELD_NUMBER: _ClassVar[int]
    req: _work_pb2.Req
    decode_address: str
    decode_worker: str
    def __init__(self, req: _Optional[_Union[_work_pb2.Req, _Mapping]] = ..., decode_address: _Optional[str] = ..., decode_worker: _Optional[str] = ...) -> None: ...

class CancelWork(_message.Message):
    __slots__ = ("uid", "attempt")
    UID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    uid: int
    attempt: int
    def __init__(self, uid: _Optional[int] = ..., attempt: _Optional[int] = ...) -> None: ...

class PrefillSessionResponse(_message.Message):
    __slots__ = ("opened", "started", "first_token", "handed_off", "failure")
    OPENED_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    HANDED_OFF_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    opened: SessionOpened
    started: PrefillStarted
    first_token: _work_pb2.Token
    handed_off: HandedOff
    failure: _work_pb2.Failure
    def __init__(self, opened: _Optional[_Union[SessionOpened, _Mapping]] = ..., started: _Optional[_Union[PrefillStarted, _Mapping]] = ..., first_token: _Optional[_Union[_work_pb2.Token, _Mapping]] = ..., handed_off: _Optional[_Union[HandedOff, _Mapping]] = ..., failure: _Optional[_Union[_work_pb2.Failure, _Mapping]] = ...) -> None: ...

class SessionOpened(_message.Message):
    __slots__ = ("worker_id",)
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    def __init__(self, worker_id: _Optional[str] = ...) -> None: ...

class PrefillStarted(_message.Message):
    __slots__ = ("uid", "attempt", "cached_tokens")
    UID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    uid: int
    attempt: int
    cached_tokens: int
    def __init__(self, uid: _Optional[int] = ..., attempt: _Optional[int] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class HandedOff(_message.Message):
    __slots__ = ("uid", "attempt")
    UID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    uid: int
    attempt: int
    def __init__(self, uid: _Optional[int] = ..., attempt: _Optional[int] = ...) -> None: ...

class FlushPrefixCacheRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FlushPrefixCacheResponse(_message.Message):
    __slots__ = ("pages_freed",)
    PAGES_FREED_FIELD_NUMBER: _ClassVar[int]
    pages_freed: int
    def __init__(self, pages_freed: _Optional[int] = ...) -> None: ...
