"""Counters and histograms by labels that cost a query next to nothing, and are rendered at the scrape.

For one thread: no count takes a lock, as those of prometheus_client do for each.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

Labels = tuple[str, ...]


class Counters(Collector):
    """Counters of one name, by the values of their labels."""

    def __init__(self, name: str, text: str, labels: Sequence[str], registry: CollectorRegistry) -> None:
        self._name, self._text, self._labels = name, text, labels
        self._counts: dict[Labels, float] = {}
        registry.register(self)

    def add(self, amount: float, *labels: str) -> None:
        """Add to the counter with these labels; it begins at 0."""
        self._counts[labels] = self._counts.get(labels, 0.0) + amount

    def keep(self, label: str, values: Container[str]) -> None:
        """Remove the counters with other values of a label than these."""
        _keep(self._counts, self._labels.index(label), values)

    def describe(self) -> Iterator[Metric]:
        """Yield the name without counts, so that the registry refuses a second family of it."""
        yield CounterMetricFamily(self._name, self._text, labels=self._labels)

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for labels, count in self._counts.items():
            family.add_metric(labels, count)
        yield family


class Histogram:
    """The number of observed values in each bucket, and their sum."""

    __slots__ = ("_bounds", "_counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    def cumulated(self) -> list[int]:
        """Return, by bound and then for all, the number of values that are not larger."""
        return list(accumulate(self._counts))


class Histograms(Collector):
    """Histograms of one name with equal buckets, by the values of their labels."""

    def __init__(
        self,
        name: str,
        text: str,
        labels: Sequence[str],
        registry: CollectorRegistry,
        *,
        buckets: Sequence[float],
    ) -> None:
        self._name, self._text, self._labels, self._bounds = name, text, labels, buckets
        self._histograms: dict[Labels, Histogram] = {}
        registry.register(self)

    def of(self, *labels: str) -> Histogram:
        """Return the histogram with these labels; it begins empty."""
        found = self._histograms.get(labels)
        if found is None:
            found = self._histograms[labels] = Histogram(self._bounds)
        return found

    def keep(self, label: str, values: Container[str]) -> None:
        """Remove the histograms with other values of a label than these."""
        _keep(self._histograms, self._labels.index(label), values)

    def describe(self) -> Iterator[Metric]:
        """Yield the name without values, so that the registry refuses a second family of it."""
        yield HistogramMetricFamily(self._name, self._text, labels=self._labels)

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        bounds = [_in_go(bound) for bound in (*self._bounds, float("inf"))]
        for labels, histogram in self._histograms.items():
            buckets = list(zip(bounds, histogram.cumulated(), strict=True))
            family.add_metric(labels, buckets, histogram.sum)
        yield family


def _keep(
    by_labels: dict[Labels, float] | dict[Labels, Histogram], index: int, values: Container[str]
) -> None:
    for labels in [each for each in by_labels if each[index] not in values]:
        del by_labels[labels]


def _in_go(bound: float) -> str:
    """Write a bound as Prometheus does, whose language is Go."""
    text: str = floatToGoString(bound)  # type: ignore[no-untyped-call]
    return text
