"""Counters and histograms by labels render as prometheus_client's own do."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from gateway.telemetry.families import Counters, Histograms

BUCKETS = (0.01, 0.5, 1.0, 4, 1024)
LABELS = st.tuples(st.sampled_from(["a", 'b"\n', "c"]), st.sampled_from(["x", "y"]))
VALUES = st.one_of(st.sampled_from(BUCKETS), st.floats(0, 2048), st.integers(0, 2048))


def rendered(registry: CollectorRegistry) -> list[str]:
    """Return the lines of the exposition without the times at which prometheus_client began to count."""
    return [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]


@given(st.lists(st.tuples(LABELS, VALUES)))
def test_as_prometheus_client(observed: list[tuple[tuple[str, str], float]]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    counters = Counters("queries", "Queries", ["site", "end"], ours)
    histograms = Histograms("took_seconds", "Time", ["site", "end"], ours, buckets=BUCKETS)
    counter = Counter("queries", "Queries", ["site", "end"], registry=theirs)
    histogram = Histogram("took_seconds", "Time", ["site", "end"], buckets=BUCKETS, registry=theirs)
    for labels, value in observed:
        counters.add(value, *labels)
        histograms.of(*labels).observe(value)
        counter.labels(*labels).inc(value)
        histogram.labels(*labels).observe(value)
    assert rendered(ours) == rendered(theirs)
    counters.keep("site", {'b"\n', "c"})
    histograms.keep("site", {'b"\n', "c"})
    counter.remove_by_labels({"site": "a"})
    histogram.remove_by_labels({"site": "a"})
    assert rendered(ours) == rendered(theirs)
    assert 'site="a"' not in "\n".join(rendered(ours))


def test_a_name_is_taken_once() -> None:
    registry = CollectorRegistry()
    Counters("queries", "Queries", ["site"], registry)
    with pytest.raises(ValueError, match="Duplicated timeseries"):
        Counters("queries", "Queries", ["site"], registry)
    Histograms("took_seconds", "Time", [], registry, buckets=BUCKETS)
    with pytest.raises(ValueError, match="Duplicated timeseries"):
        Histograms("took_seconds", "Time", [], registry, buckets=BUCKETS)
