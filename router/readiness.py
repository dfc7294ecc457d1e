"""When the router would serve a request: told to health, and once on standard output."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from common.address import Address
from common.log_output import tell
from common.rpc.health import Health
from router.fleet.fleet import Fleet
from router.fleet.workers import Worker

TELL_SECONDS = 0.5

log = logging.getLogger(__name__)


class Readiness:
    """A RegistryListener."""

    GENERATION: Final = "pdserve.v1.GenerationService"
    REGISTRY: Final = "pdserve.v1.RegistryService"

    def __init__(self, fleet: Fleet, health: Health, *, address: Address) -> None:
        self._fleet = fleet
        self._health = health
        self._address = address
        self._is_ready = False
        self._was_ready = False
        self._is_closed = False

    def joined(self, worker: Worker) -> None:
        pass

    def left(self, worker: Worker, *, with_last_words: bool) -> None:
        pass

    def reported(self) -> None:
        pass

    def close(self) -> None:
        """The router is going: workers that leave it from now on are no news."""
        self._is_closed = True

    def changed(self) -> None:
        if self._is_closed or self._is_ready is (ready := self._fleet.is_ready):
            return
        self._is_ready = ready
        self._health.set(self.GENERATION, ready)
        if not ready:
            # Later: when everything is stopped at once, workers may leave before the router has been told that it goes, too.
            asyncio.get_running_loop().call_later(TELL_SECONDS, self._tell_why_not)
        elif not self._was_ready:
            self._was_ready = True
            tell(f"router ready on {self._address}")

    def _tell_why_not(self) -> None:
        if not (self._is_ready or self._is_closed):
            log.warning("no pair of workers is ready: %s", self._fleet.why_not_ready())
