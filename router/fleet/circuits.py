"""Circuits: every registered worker's breaker, told how attempts at requests fare."""

from __future__ import annotations

import logging
import math

from common.errors import PdserveError
from router.fleet.circuit import Circuit, is_fault, waits, willing
from router.fleet.placement import Pair
from router.fleet.registry import Registry
from router.fleet.workers import Worker

log = logging.getLogger(__name__)


class Circuits:
    """Event loop only. Whoever waits for a worker is told of a change through the registry."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    @property
    def willing(self) -> list[Worker]:
        """Registered workers that a request may be sent to now, as far as their circuits are concerned."""
        return willing(self._registry.live)

    @property
    def are_closed(self) -> bool:
        """All of them: whom to send requests to changes only when one opens, which the registry tells."""
        return all(worker.breaker.circuit is Circuit.CLOSED for worker in self._registry.live)

    @property
    def seconds_until_try(self) -> float:
        """Until some circuit that is open lets a request through; infinite if none is."""
        return min((seconds for _, seconds in waits(self._registry.live) if seconds > 0.0), default=math.inf)

    def sent(self, pair: Pair) -> None:
        for worker in pair.workers:
            worker.breaker.sent()

    def succeeded(self, pair: Pair) -> None:
        """It did its part of a request, or the last of it."""
        for worker in pair.workers:
            if worker.breaker.succeeded():
                log.info("the circuit of %s is closed", worker)
                self._registry.notify()

    def failed(self, pair: Pair, error: PdserveError, *, retryable: bool, blame: frozenset[str]) -> None:
        """An attempt there failed. blame: ids of those that may be at fault; empty: any of them."""
        suspects = [worker for worker in pair.workers if worker.id in (blame or pair.ids)]
        for worker in suspects:
            worker.attempts_failed += 1
            if not is_fault(error, retryable=retryable):
                continue
            if worker.breaker.failed(str(error), share=1 / len(suspects)):
                seconds = dict(waits([*self._registry.live, worker]))[worker]
                log.warning("the circuit of %s is open for %.0f s: %s", worker, seconds, error)
                self._registry.notify()
