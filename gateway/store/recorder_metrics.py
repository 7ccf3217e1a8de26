"""Export the state of the recorder to Prometheus: how full its journal is, and what was dropped or lost."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.store.recorder import Recorder


class RecorderMetrics(Collector):
    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def collect(self) -> Iterator[Metric]:
        """Yield the figures of this replica."""
        health = self._recorder.health
        yield GaugeMetricFamily(
            "mico_journal_records", "Records that are not in the database yet", health.pending
        )
        yield GaugeMetricFamily(
            "mico_journal_bytes", "Bytes of the journal that waits for the database", health.journal_bytes
        )
        yield GaugeMetricFamily(
            "mico_journal_limit_bytes", "Bytes of a full journal", health.journal_limit_bytes
        )
        yield CounterMetricFamily(
            "mico_records_without_decisions",
            "Queries recorded without their decisions, since the journal was filling",
            health.without_decisions,
        )
        yield CounterMetricFamily("mico_records_lost", "Records that are in the log only", health.lost)
