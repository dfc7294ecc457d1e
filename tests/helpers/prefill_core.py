"""CoreDriver: a PrefillCore over a FakeRunner, driven by hand with a manual clock; its accounts are checked after every call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from common.core import Req, SamplingParams
from common.engine.handle import DEFERRED, Reply
from common.work_key import WorkKey
from prefill_worker.commands import Admit, Admitted, Check, Compute, Destination, Forget
from prefill_worker.core import PrefillCore
from prefill_worker.events import Broken, PagesReady, PrefillDone, PrefillStarted
from tests.helpers.fake_runner import FakeRunner

EPOCH = 7


def make_req(ids: Sequence[int], *, uid: int = 1, output_len: int = 8, **fields: Any) -> Req:
    """As a router would submit it."""
    sampling = fields.pop("sampling_params", SamplingParams(max_tokens=output_len))
    return Req(
        input_ids=torch.tensor(list(ids), dtype=torch.int32),
        table_idx=-1,
        cached_len=0,
        output_len=output_len,
        uid=uid,
        sampling_params=sampling,
        cache_handle=None,
        router_epoch=EPOCH,
        **fields,
    )


class CoreDriver:
    """clock: settable. events: everything emitted but replies. admitted: replies to Admit by key."""

    def __init__(self, *, max_running: int = 4, chunk_tokens: int = 8, **runner: Any) -> None:
        self.clock = 100.0
        self.events: list[Any] = []
        self.admitted: dict[WorkKey, Admitted] = {}
        self.runner = FakeRunner(**({"rows": max_running} | runner))
        self.core = PrefillCore(
            self.runner, emit=self._emit, max_running=max_running, chunk_tokens=chunk_tokens, clock=lambda: self.clock
        )
        self._calls: dict[int, WorkKey] = {}

    def admit(self, req: Req) -> WorkKey:
        call_id = len(self._calls)
        self._calls[call_id] = req.key
        assert self.core.handle(Admit(req), call_id) is DEFERRED
        self.check()
        return req.key

    def abandon(self, key: WorkKey) -> None:
        self.core.abandon(next(call for call, owner in self._calls.items() if owner == key))
        self.check()

    def compute(self, key: WorkKey, destination: Destination | None = None) -> None:
        self.do(Compute(key, destination))

    def compute_for_grpc(self, key: WorkKey, *, pages: int, prefix_len: int = 0, deadline: float = 1e9) -> None:
        """With a reservation of so many pages from prefix_len on."""
        self.compute(key, Destination("grpc", tuple(range(pages)), prefix_len, deadline))

    def forget(self, key: WorkKey) -> None:
        self.do(Forget(key))

    def do(self, command: Any) -> Any:
        reply = self.core.handle(command, 10_000)
        self.check()
        return reply

    def step(self) -> None:
        assert self.core.has_work()
        self.core.step()
        self.check()

    def run(self, *, limit: int = 100) -> int:
        """Steps until nothing is to be computed; how many it took."""
        for steps in range(limit):
            if not self.core.has_work():
                return steps
            self.step()
        raise AssertionError(f"still busy after {limit} steps")

    def check(self) -> None:
        self.core.handle(Check(), None)

    def of(self, kind: type[Any], key: WorkKey) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind) and event.key == key]

    def done(self, key: WorkKey) -> PrefillDone:
        (event,) = self.of(PrefillDone, key)
        assert isinstance(event, PrefillDone)
        return event

    def started(self, key: WorkKey) -> PrefillStarted:
        (event,) = self.of(PrefillStarted, key)
        assert isinstance(event, PrefillStarted)
        return event

    def broken(self, key: WorkKey) -> Broken:
        (event,) = self.of(Broken, key)
        assert isinstance(event, Broken)
        return event

    def announced(self, key: WorkKey) -> list[tuple[int, int]]:
        """(page_index, page_id) of every page said to be ready, in order."""
        return [tuple(page) for event in self.of(PagesReady, key) for page in event.pages]

    def prefill(self, ids: Sequence[int], *, uid: int) -> WorkKey:
        """One whole life of a prompt with nothing to hand over."""
        key = self.admit(make_req(ids, uid=uid, output_len=1))
        self.compute(key)
        self.run()
        self.forget(key)
        return key

    def assert_idle(self) -> None:
        """Nothing is held: every page is free or cached, every row free."""
        counts = self.core.handle(Check(), None)
        assert (counts.held, counts.quarantined) == (0, 0), counts
        assert self.runner.page_table.num_free == self.runner.page_table.rows

    def _emit(self, event: Any) -> None:
        if isinstance(event, Reply):
            self.admitted[self._calls[event.call_id]] = event.value
        else:
            self.events.append(event)
