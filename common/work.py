"""Plain values about work that cross a seam: engine thread to event loop and, through common/wire.py, process to process.

Torch-free, picklable, immutable.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Literal, NamedTuple

from common.errors import Full, Incompatible, Leaving, PdserveError, from_status, status_number
from common.work_key import WorkKey

Role = Literal["prefill", "decode"]
ROLES: tuple[Role, ...] = ("prefill", "decode")


def role_of(name: str) -> Role:
    """Raises ValueError."""
    for role in ROLES:
        if name == role:
            return role
    raise ValueError(f"role must be 'prefill' or 'decode', got {name!r}")


PROTOCOL_VERSION = 1
POOL_LAYOUT = "page,layer,kv,token,head,dim"
MAX_COMPLETIONS = 16
"""Of one request."""


class FinishReason(IntEnum):
    """Why a completion ended; numbered as on the wire. A token that ends nothing carries None."""

    STOP = 1
    LENGTH = 2
    ABORT = 3


class TokenOut(NamedTuple):
    """One generated token. index counts from prompt_len; top is (token id, logprob), best first.
    cached_tokens: on an attempt's first token, the leading tokens that the prefill worker had cached."""

    key: WorkKey
    index: int  # type: ignore[assignment]  # it hides the method of tuples, which has no use here
    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    finish: FinishReason | None = None
    cached_tokens: int | None = None


class WorkFailure(NamedTuple):
    """An attempt that ended without its tokens. code is a gRPC status number. handed_back: by a worker that is leaving, or full,
    so that it counts as no failure."""

    key: WorkKey
    code: int
    message: str
    retryable: bool
    handed_back: bool = False

    @classmethod
    def of(cls, key: WorkKey, error: PdserveError, *, retryable: bool) -> WorkFailure:
        return cls(key, status_number(error), str(error), retryable, handed_back=isinstance(error, Leaving | Full))

    @property
    def error(self) -> PdserveError:
        return from_status(self.code, self.message)


@dataclass(frozen=True)
class Compatibility:
    """What two processes must share before KV may pass between them; see Compatibility in work.proto for each field."""

    fingerprint: str
    dtype: str
    page_size: int
    max_context: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    pool_layout: str = POOL_LAYOUT
    protocol_version: int = PROTOCOL_VERSION

    def check(self, theirs: Compatibility, *, our_name: str, their_name: str) -> None:
        """Raises Incompatible naming the first field that differs and both values."""
        for field in fields(self):
            ours, other = getattr(self, field.name), getattr(theirs, field.name)
            if ours != other:
                raise Incompatible(field.name, ours, other, our_name=our_name, their_name=their_name)


class PageCounts(NamedTuple):
    """A pool's pages by who has them: free + held + cached + quarantined == total."""

    free: int
    held: int
    cached: int
    quarantined: int
    total: int


@dataclass(frozen=True)
class WorkerProfile:
    """What does not change while a worker runs. local_prefill: a decode worker that computes prompts too, and is placed alone.
    chunk_tokens: most prompt tokens it computes in one step; 0: none, or not known.
    local_prefill_tokens: a decode worker that is also a partner of prefill workers takes shorter prompts alone; 0: none.
    max_requests: whose prompts are there at once, those in line included; 0: not known."""

    worker_id: str
    role: Role
    address: str
    compatibility: Compatibility
    device: str
    total_pages: int
    max_running: int
    version: str
    local_prefill: bool = False
    chunk_tokens: int = 0
    local_prefill_tokens: int = 0
    max_requests: int = 0


@dataclass(frozen=True)
class WorkerLoad:
    """How a worker is doing. running: being computed; waiting: queued, reserved or being received."""

    running: int = 0
    waiting: int = 0
    queued_tokens: int = 0
    pages: PageCounts = PageCounts(0, 0, 0, 0, 0)
    draining: bool = False
