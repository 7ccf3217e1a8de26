"""A page of Prometheus metrics as numbers, and what of it says how busy a server is. Pure text work."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite

_LINE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?$")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class Sample:
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Names:
    """The metrics of one kind of server; of several names the first that the page has counts.

    `usage` is a share from 0 to 1. `capacity_of` multiplies labels of an info metric into KV tokens.
    """

    running: Sequence[str]
    waiting: Sequence[str] = ()
    usage: Sequence[str] = ()
    generated: Sequence[str] = ()
    prompted: Sequence[str] = ()
    capacity: Sequence[str] = ()
    capacity_of: tuple[str, Sequence[str]] | None = None


@dataclass(frozen=True, slots=True)
class Busy:
    """What a server says of itself. None: its page does not say."""

    running: int
    waiting: int | None = None
    kv_usage: float | None = None
    kv_capacity_tokens: int | None = None
    tokens_total: int | None = None
    prompt_tokens_total: int | None = None


class UnknownPage(Exception):
    """A page without the metric that its table counts on; the message names it."""


def samples(page: str) -> dict[str, list[Sample]]:
    """By metric. Lines that make no sense are left out: the rest of the page may still be of use."""
    found: dict[str, list[Sample]] = {}
    for line in page.splitlines():
        match = None if line.startswith("#") else _LINE.match(line.strip())
        value = None if match is None else _number(match[3])
        if match is not None and value is not None:
            labels = dict(_LABEL.findall(match[2])) if match[2] else {}
            found.setdefault(match[1], []).append(Sample(labels, value))
    return found


def busy(page: Mapping[str, Sequence[Sample]], names: Names) -> Busy:
    """Raises UnknownPage. Engines of one server (data parallel) add up; their shares of KV are averaged."""
    running = _first(page, names.running)
    if running is None:
        raise UnknownPage(f"it has no {' or '.join(names.running)}")
    usage = _first(page, names.usage)
    return Busy(
        running=round(_sum(running)),
        waiting=_total(_first(page, names.waiting)),
        kv_usage=None if usage is None else min(1.0, max(0.0, _sum(usage) / len(usage))),
        kv_capacity_tokens=_total(_first(page, names.capacity)) or _from_labels(page, names.capacity_of),
        tokens_total=_total(_first(page, names.generated)),
        prompt_tokens_total=_total(_first(page, names.prompted)),
    )


def _first(page: Mapping[str, Sequence[Sample]], names: Iterable[str]) -> Sequence[Sample] | None:
    return next((page[name] for name in names if name in page), None)


def _sum(found: Sequence[Sample]) -> float:
    return sum(max(0.0, each.value) for each in found)


def _total(found: Sequence[Sample] | None) -> int | None:
    return None if found is None else round(_sum(found))


def _from_labels(
    page: Mapping[str, Sequence[Sample]], source: tuple[str, Sequence[str]] | None
) -> int | None:
    """The sum over engines of the product of labels, such as block_size x num_gpu_blocks."""
    total = 0
    for each in page.get(source[0], ()) if source else ():
        product = 1
        for label in source[1] if source else ():
            text = each.labels.get(label, "")
            product *= int(text) if text.isdecimal() else 0
        total += product
    return total or None


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if isfinite(value) else None
