"""Parse Prometheus metrics, and read the load of a server from them. Does no I/O."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import isfinite

_LINE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?$")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')

MAX_REQUESTS = 65_536
"""The most requests at a server that are believed: the load of a site has an entry for each."""
MAX_KV_TOKENS = 2**32 - 1
"""The most tokens that a load report carries."""
MAX_TOTAL = 2**53
"""The most tokens of a counter: floats are exact up to this."""
MAX_DIGITS = 10
"""Longer numbers in labels are no sizes."""
_RANKS = frozenset({"tp_rank", "pp_rank", "moe_ep_rank"})
"""Labels of SGLang's processes that share each request; those of `dp_rank` have requests of their own."""


@dataclass(frozen=True, slots=True)
class Sample:
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class MetricNames:
    """The metrics of one kind of server; of several names the first that is exported counts. A name may end
    in labels, `{name="value"}`, that samples must have.

    `usage` is a share from 0 to 1. `capacity_of` multiplies labels of an info metric into KV tokens.
    """

    running: Sequence[str]
    waiting: Sequence[str] = ()
    usage: Sequence[str] = ()
    generated: Sequence[str] = ()
    capacity: Sequence[str] = ()
    capacity_of: tuple[str, Sequence[str]] | None = None


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """The load of a server by its own metrics. None: it does not export that."""

    running: int
    waiting: int | None = None
    kv_usage: float | None = None
    kv_capacity_tokens: int | None = None
    tokens_total: int | None = None


class UnknownMetrics(Exception):
    """Metrics without the one that `MetricNames` requires; the message names it."""


def parse_metrics(text: str) -> dict[str, list[Sample]]:
    """Parse the text format into samples by metric name; skip malformed lines, the rest may be of use."""
    found: dict[str, list[Sample]] = {}
    for line in text.splitlines():
        match = None if line.startswith("#") else _LINE.match(line.strip())
        if match is None:
            continue
        with suppress(ValueError):
            value = float(match[3])
            if isfinite(value):
                labels = dict(_LABEL.findall(match[2])) if match[2] else {}
                found.setdefault(match[1], []).append(Sample(labels, value))
    return found


def server_load(metrics: Mapping[str, Sequence[Sample]], names: MetricNames) -> ServerLoad:
    """Read the load of a server from its metrics. Raises UnknownMetrics.

    Engines of one server (data parallel) add up; their shares of KV are averaged.
    """
    running = _without_parts(_first(metrics, names.running))
    if running is None:
        raise UnknownMetrics(f"it has no {' or '.join(names.running)}")
    usage = _first(metrics, names.usage)
    return ServerLoad(
        running=round(min(MAX_REQUESTS, _sum(running))),
        waiting=_total(_without_parts(_first(metrics, names.waiting)), MAX_REQUESTS),
        kv_usage=None if usage is None else min(1.0, max(0.0, _sum(usage) / len(usage))),
        kv_capacity_tokens=_total(_first(metrics, names.capacity), MAX_KV_TOKENS)
        or label_products(metrics, names.capacity_of),
        tokens_total=_total(_first(metrics, names.generated), MAX_TOTAL),
    )


def _first(metrics: Mapping[str, Sequence[Sample]], names: Iterable[str]) -> Sequence[Sample] | None:
    return next((found for name in names if (found := _select(metrics, name))), None)


def _select(metrics: Mapping[str, Sequence[Sample]], name: str) -> Sequence[Sample]:
    name, _, labels = name.partition("{")
    wanted = dict(_LABEL.findall(labels)).items()
    return _once(each for each in metrics.get(name, ()) if wanted <= each.labels.items())


def _once(found: Iterable[Sample]) -> Sequence[Sample]:
    """Keep one of the samples, the largest, in which several ranks of SGLang tell the same."""
    kept = {}
    for each in sorted(found, key=lambda each: each.value):
        kept[frozenset(label for label in each.labels.items() if label[0] not in _RANKS)] = each
    return list(kept.values())


def _without_parts(found: Sequence[Sample] | None) -> Sequence[Sample] | None:
    """Drop what SGLang tells by priority beside the sum, whose priority is empty."""
    sums = [each for each in found or () if each.labels.get("priority") == ""]
    return sums or found


def _sum(found: Sequence[Sample]) -> float:
    return sum(max(0.0, each.value) for each in found)


def _total(found: Sequence[Sample] | None, limit: int) -> int | None:
    return None if found is None else round(min(limit, _sum(found)))


def label_products(
    metrics: Mapping[str, Sequence[Sample]], source: tuple[str, Sequence[str]] | None
) -> int | None:
    """Sum over engines the product of labels, such as block_size x num_gpu_blocks, up to MAX_KV_TOKENS."""
    total = 0
    for each in metrics.get(source[0], ()) if source else ():
        product = 1
        for label in source[1] if source else ():
            text = each.labels.get(label, "")
            product *= int(text) if text.isdecimal() and len(text) <= MAX_DIGITS else 0
        total = min(MAX_KV_TOKENS, total + product)
    return total or None
