"""What the prefill engine tells the event loop unasked. Plain immutable values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from common.engine.handle import Urgent
from common.errors import PdserveError
from common.work import PageCounts, TokenOut
from common.work_key import WorkKey


class Page(NamedTuple):
    """A complete page to send. page_index: its place in the destination's page_ids; page_id: in this worker's pool or, where the
    event loop cannot address the pool, the slot of shared memory that it lies in."""

    page_index: int
    page_id: int


@dataclass(frozen=True)
class PrefillStarted(Urgent):
    """The first chunk is about to be computed."""

    key: WorkKey
    cached_tokens: int


@dataclass(frozen=True)
class PagesReady(Urgent):
    """These pages are complete and stay as they are until Forget, or until SlotsFree of the slots they lie in (grpc destinations
    only). With slots, the last ones may come after PrefillDone."""

    key: WorkKey
    pages: tuple[Page, ...]


@dataclass(frozen=True)
class PrefillDone(Urgent):
    """The whole prompt is computed, and every page is sent (shm, cuda_ipc) or announced (grpc). On its way before the engine
    commits ahead (cuda_ipc).

    tokens: one per completion, in order of uid. page_crc32: of each page sent, if the destination said verify.
    """

    key: WorkKey
    tokens: tuple[TokenOut, ...]
    pages_sent: int
    page_crc32: tuple[int, ...]


@dataclass(frozen=True)
class Broken:
    """The engine stopped working on this request (lease over); it keeps its pages until Forget."""

    key: WorkKey
    error: PdserveError


@dataclass(frozen=True)
class Stats:
    """How things stand; sent when something changed. See WorkerLoad for running, waiting, queued_tokens.

    computed_tokens: prompt tokens computed since the start.
    """

    running: int
    waiting: int
    queued_tokens: int
    computed_tokens: int
    pages: PageCounts
