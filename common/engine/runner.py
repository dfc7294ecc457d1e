"""Runner: a model with its KV pool and page table behind one call, launch(batch). The seam, without an engine behind it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from common.core import Batch, Req
from common.engine.kv_pages import KvPages
from common.engine.peer_store import PeerStore
from common.engine.table_rows import TableRows
from common.work import Compatibility


class Sampled(NamedTuple):
    """One token and, if asked for, log-probabilities under the raw logits; top is best first."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Pending(Protocol):
    """A launched step, whose tokens may not be there yet."""

    def result(self) -> list[list[Sampled]]:
        """Waits for the device. Per request of the batch, in order: nothing unless its last chunk was computed, else n tokens,
        for completions completion, completion + 1, ... May be called once; steps are asked in the order of their launch."""


class Runner(Protocol):
    """What the workers' loops see of the model. Used by the engine thread only.

    lookahead: launched steps whose results may be outstanding when the next one is launched. 0: launch() computes at once. 1: the
    device computes step N+1 while the host reads step N.
    """

    @property
    def compatibility(self) -> Compatibility: ...
    @property
    def eos_token_ids(self) -> frozenset[int]: ...
    @property
    def page_table(self) -> TableRows: ...
    @property
    def pool(self) -> KvPages: ...
    @property
    def lookahead(self) -> int: ...

    def launch(self, batch: Batch, stores: Mapping[Req, PeerStore] | None = None) -> Pending:
        """One forward pass over tokens [cached_len, device_len) of every request, whose page table rows reach that far; what it
        samples is at output index device_len - prompt_len.

        Fills the batch's open fields. The requests are not changed, and may be as soon as this has returned: complete_one or
        complete_chunk at once, append_host when the token is there. So with lookahead 1 a decoding request may come with
        device_len = len(input_ids) + 1: its last token is on the device only, in its page table row's slot, which step N
        filled. Pages and the row of a request stay its own until its last launched step's result was read.
        stores: requests whose KV the kernels also store in a peer's pool; complete there once the result is read."""

    def run(self, batch: Batch) -> list[list[Sampled]]:
        """launch(batch).result()."""
