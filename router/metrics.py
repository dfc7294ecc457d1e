"""What the router counts. Whatever goes wrong in here is logged and never reaches the code that is measured."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import Metric

from common.errors import PdserveError
from common.metrics import REGISTRY, STAGE_BUCKETS, gauge, record, register_gauges
from common.work import ROLES
from router.admission import Admission
from router.completion import Stage
from router.dispatch import Dispatch
from router.fleet.circuit import Circuit
from router.fleet.fleet import Fleet
from router.fleet.workers import Worker, WorkerState
from router.hot_metrics import HotCounter, HotHistogram
from router.pacing import Rounds
from router.queueing.request_queue import RequestQueue

TTFT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
GAP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 5)
TOTAL_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)


class RouterMetrics:
    """One set per registry. Event loop only, but for gauges, which the scraping thread reads."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        own: dict[str, Any] = {"registry": registry}
        self._registry = registry
        self._requests = HotCounter("pdserve_requests", "Ended requests, by gRPC status.", "outcome")
        self._refusals = HotCounter("pdserve_refusals", "Work refused before it began.", "reason")
        self._tokens = HotCounter("pdserve_tokens", "Tokens of begun requests.", "kind", ("prompt", "output"))
        self._begun = HotCounter("pdserve_attempts", "Attempts begun.", "cause")
        self._failed = Counter("pdserve_attempt_failures", "Attempts that failed, by gRPC status.", ["code"], **own)
        self._retracted = Counter("pdserve_retractions", "Attempts that a worker gave back, being full or leaving.", **own)
        self._ttft = HotHistogram("pdserve_ttft_seconds", "From arrival to the first token.", TTFT_BUCKETS)
        self._gap = HotHistogram("pdserve_token_gap_seconds", "Mean time between the tokens of a delta.", GAP_BUCKETS)
        self._queue = HotHistogram("pdserve_queue_seconds", "From arrival until a prefill worker began.", STAGE_BUCKETS)
        self._prefill = HotHistogram("pdserve_prefill_seconds", "From then until the first token.", STAGE_BUCKETS)
        self._handoff = HotHistogram("pdserve_handoff_seconds", "From then until the decode worker had it.", STAGE_BUCKETS)
        self._total = HotHistogram("pdserve_request_seconds", "From arrival to the end.", TOTAL_BUCKETS)
        for hot in (self._requests, self._refusals, self._tokens, self._begun):
            registry.register(hot)
        for times in (self._ttft, self._gap, self._queue, self._prefill, self._handoff, self._total):
            registry.register(times)

    def watch(self, *, admission: Admission, queue: RequestQueue, dispatch: Dispatch, fleet: Fleet, rounds: Rounds) -> None:
        """What the gauges are read from, at scrape time."""

        def requests() -> Iterable[Metric]:
            stages = dispatch.stages()
            on_workers = {stage.name.lower(): stages[stage] for stage in (Stage.PREFILL, Stage.DECODE)}
            yield gauge("pdserve_requests_in_flight", "Requests let in and not ended.", admission.in_flight)
            yield gauge("pdserve_requests_queued", "Requests let in and without their first token.", admission.queued)
            yield gauge(
                "pdserve_requests_in_line",
                "New requests, and completions that run again, that wait for workers with room.",
                len(queue),
            )
            yield gauge("pdserve_tokens_in_line", "Prompt tokens of new requests that wait for workers with room.", queue.tokens)
            yield gauge("pdserve_completions", "Completions on workers, by stage.", on_workers, "stage")
            yield gauge("pdserve_write_gap_seconds", "Between two deltas of a stream but its first and last.", rounds.gap)
            yield gauge("pdserve_outbox_messages", "Messages that wait to be sent over the sessions.", fleet.num_unsent)

        def workers() -> Iterable[Metric]:
            live = fleet.registry.live
            states = Tally((worker.role, worker.state) for worker in [*live, *fleet.registry.recently_lost])
            by_state = {(role, state.value): states[role, state] for role in ROLES for state in WorkerState}
            yield gauge("pdserve_workers", "Workers known, by state; lost ones for a while.", by_state, "role", "state")
            yield gauge("pdserve_ready", "1 while a request would be served.", fleet.is_ready)
            yield gauge("pdserve_ready_workers", "Workers that take work from this router.", _ready(live), "role")
            circuits = Tally((worker.role, worker.breaker.circuit) for worker in live)
            by_circuit = {(role, circuit.value): circuits[role, circuit] for role in ROLES for circuit in Circuit}
            yield gauge("pdserve_circuits", "Registered workers, by the state of their circuit.", by_circuit, "role", "circuit")

        register_gauges("requests", requests, self._registry)
        register_gauges("workers", workers, self._registry)

    @property
    def output_tokens(self) -> int:
        """Sent to clients so far."""
        return self._tokens.total("output")

    def refused(self, error: PdserveError) -> None:
        """A request was ended before an attempt at it began."""
        record(lambda: self._refusals.add(error.reason))

    def request_ended(self, outcome: str) -> None:
        """outcome: "OK" or the status's name."""
        record(lambda: self._requests.add(outcome))

    def prompt(self, tokens: int) -> None:
        """A request is about to begin."""
        record(lambda: self._tokens.add("prompt", tokens))

    def first_token(self, seconds: float) -> None:
        record(lambda: self._ttft.observe(seconds))

    def sent(self, tokens: int, *, gap_seconds: float | None = None) -> None:
        """A delta of so many tokens is on its way. gap_seconds: between them; None for a completion's first delta."""

        def update() -> None:
            self._tokens.add("output", tokens)
            if gap_seconds is not None:
                self._gap.observe(gap_seconds)

        record(update)

    def completion_ended(self, *, queue: float, prefill: float, handoff: float | None, total: float) -> None:
        """One has sent its Finished. All in seconds; handoff: None if no decode worker had it."""

        def update() -> None:
            self._queue.observe(queue)
            self._prefill.observe(prefill)
            if handoff is not None:
                self._handoff.observe(handoff)
            self._total.observe(total)

        record(update)

    def attempt_begun(self, cause: str) -> None:
        """cause: "first", "failure" or "retraction" of the one before."""
        record(lambda: self._begun.add(cause))

    def attempt_failed(self, error: PdserveError) -> None:
        record(lambda: self._failed.labels(error.status.name).inc())

    def retracted(self) -> None:
        record(self._retracted.inc)


def _ready(workers: Iterable[Worker]) -> dict[str, int]:
    ready = Tally(worker.role for worker in workers if worker.is_placeable)
    return {role: ready[role] for role in ROLES}
