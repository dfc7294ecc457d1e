"""ClusterView: the router and its workers at one moment, as GetCluster shows them."""

from __future__ import annotations

import time
from collections.abc import Callable

from common.rpc.gen.pdserve.v1 import generation_pb2 as pb2
from common.version import VERSION
from common.work import WorkerLoad
from router.admission import Admission
from router.completion import Stage
from router.dispatch import Dispatch
from router.fleet.fleet import Fleet
from router.fleet.workers import Worker
from router.metrics import RouterMetrics
from router.queueing.request_queue import RequestQueue


class ClusterView:
    def __init__(
        self,
        *,
        fleet: Fleet,
        admission: Admission,
        queue: RequestQueue,
        dispatch: Dispatch,
        metrics: RouterMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """clock: the registry's."""
        self._fleet = fleet
        self._admission = admission
        self._queue = queue
        self._dispatch = dispatch
        self._metrics = metrics
        self._clock = clock
        self._started_at = clock()

    def to_pb(self) -> pb2.GetClusterResponse:
        now, registry = self._clock(), self._fleet.registry
        workers = [*registry.live, *registry.recently_lost]
        return pb2.GetClusterResponse(workers=[worker_to_pb(worker, now) for worker in workers], router=self._router_to_pb(now))

    def _router_to_pb(self, now: float) -> pb2.Router:
        admission, stages = self._admission, self._dispatch.stages()
        is_ready = self._fleet.is_ready and not admission.is_closed
        return pb2.Router(
            version=VERSION,
            uptime_ms=_ms(now - self._started_at),
            is_ready=is_ready,
            why_not_ready="" if is_ready else admission.closed_because or self._fleet.why_not_ready(),
            in_flight=admission.in_flight,
            queued=admission.queued,
            in_line=len(self._queue),
            tokens_in_line=self._queue.tokens,
            max_queue=admission.max_queue,
            max_in_flight=admission.max_in_flight,
            completions_in_prefill=stages[Stage.PREFILL],
            completions_in_decode=stages[Stage.DECODE],
            requests=admission.let_in,
            output_tokens=self._metrics.output_tokens,
            is_stopping=admission.is_closed,
        )


def worker_to_pb(worker: Worker, now: float) -> pb2.Worker:
    """now: of the registry's clock."""
    profile = worker.profile
    # What it had when it last reported it has no more, or says nothing of.
    load = worker.load if worker.lost_at is None else WorkerLoad()
    return pb2.Worker(
        id=worker.id,
        role=worker.role,
        address=profile.address,
        state=worker.state,
        running=load.running,
        waiting=load.waiting,
        free_pages=load.pages.free,
        total_pages=profile.total_pages,
        cached_pages=load.pages.cached,
        device=profile.device,
        held_pages=load.pages.held,
        quarantined_pages=load.pages.quarantined,
        circuit=worker.breaker.circuit,
        trouble=worker.trouble_now,
        queued_tokens=load.queued_tokens,
        max_running=profile.max_running,
        local_prefill=profile.local_prefill,
        version=profile.version,
        has_session=worker.has_session,
        last_report_ms=_ms(now - worker.reported_at),
        registered_ms=_ms(now - worker.joined_at),
        in_flight=worker.ours.completions,
        attempts=worker.attempts,
        attempts_failed=worker.attempts_failed,
        lost_ms=None if worker.lost_at is None else _ms(now - worker.lost_at),
    )


def _ms(seconds: float) -> int:
    return max(0, round(seconds * 1000))
