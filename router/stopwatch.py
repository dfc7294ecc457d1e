"""Where one request's time went."""

from __future__ import annotations

from common.rpc.gen.pdserve.v1 import generation_pb2
from router.completion import Completion
from router.metrics import RouterMetrics


class Stopwatch:
    """All times are time.monotonic() seconds."""

    def __init__(self, *, arrived_at: float, metrics: RouterMetrics) -> None:
        self._arrived_at = arrived_at
        self._metrics = metrics
        self._first_sent_at: float | None = None
        self._last: dict[int, tuple[float, int]] = {}

    def sending(self, number: int, *, count: int, now: float) -> None:
        """Completion `number` is about to have sent count tokens in all."""
        if (last := self._last.get(number)) is None:
            if self._first_sent_at is None:
                self._first_sent_at = now
                self._metrics.first_token(now - self._arrived_at)
            self._metrics.sent(count)
        elif (fresh := count - last[1]) > 0:
            self._metrics.sent(fresh, gap_seconds=(now - last[0]) / fresh)
        self._last[number] = now, count

    def timing(self, completion: Completion, prefill_started_at: float | None, now: float) -> generation_pb2.Timing:
        """What never happened took no time, and what it would have ended ends now."""
        first_token_at = completion.first_token_at if completion.first_token_at is not None else now
        started_at = prefill_started_at if prefill_started_at is not None else first_token_at
        handed_off_at = completion.handed_off_at if completion.handed_off_at is not None else first_token_at
        self._metrics.completion_ended(
            queue=started_at - self._arrived_at,
            prefill=first_token_at - started_at,
            handoff=None if completion.handed_off_at is None else handed_off_at - first_token_at,
            total=now - self._arrived_at,
        )
        return generation_pb2.Timing(
            queue_ms=_ms(self._arrived_at, started_at),
            prefill_ms=_ms(started_at, first_token_at),
            handoff_ms=_ms(first_token_at, handed_off_at),
            ttft_ms=_ms(self._arrived_at, self._first_sent_at if self._first_sent_at is not None else now),
            total_ms=_ms(self._arrived_at, now),
            attempts=completion.attempts,
        )


def _ms(begin: float, end: float) -> float:
    return max(0.0, end - begin) * 1000
