"""Metrics for the path of every delta and request: the event loop adds plain numbers, and only a scrape makes metrics of them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector


class HotCounter(Collector):
    def __init__(self, name: str, text: str, label: str, values: Sequence[str] = ()) -> None:
        """values: of the one label, those that are shown before they were first counted."""
        self._name, self._text, self._label = name, text, label
        self._totals = dict.fromkeys(values, 0)

    def add(self, value: str, count: int = 1) -> None:
        """What is not more than 0 is left out: a counter never decreases (OBS-03)."""
        if count > 0:
            self._totals[value] = self._totals.get(value, 0) + count

    def total(self, value: str) -> int:
        return self._totals.get(value, 0)

    def collect(self) -> Iterable[Metric]:
        family = CounterMetricFamily(self._name, self._text, labels=[self._label])
        for value, total in list(self._totals.items()):
            family.add_metric([value], total)
        yield family


class HotHistogram(Collector):
    def __init__(self, name: str, text: str, buckets: Sequence[float]) -> None:
        self._name, self._text, self._buckets = name, text, buckets
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._buckets, value)] += 1
        self._sum += value

    def collect(self) -> Iterable[Metric]:
        counts, total, rows = list(self._counts), 0, []
        for bound, count in zip((*map(str, self._buckets), "+Inf"), counts, strict=True):
            total += count
            rows.append((bound, total))
        yield HistogramMetricFamily(self._name, self._text, buckets=rows, sum_value=self._sum)
