"""What plots are drawn from, bounded: 15 minutes at one sample a second, a day at one a minute."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from statistics import fmean
from typing import Any

SECONDS_KEPT = 15 * 60
MINUTES_KEPT = 24 * 60
PLOTTED_SITES = 200
"""A sample keeps the load of so many sites, the most loaded ones: memory has a limit, whatever joins."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One point of every plot. `at` is unix time; `load` is outstanding / capacity by site.

    None is what nobody measured: a gap in the plot, never a zero.
    """

    at: float
    output_per_s: float = 0.0
    input_per_s: float = 0.0
    in_flight: float = 0.0
    queued: float = 0.0
    ttft_p95_s: float | None = None
    errors_per_min: float = 0.0
    headroom: float | None = None
    clouds: dict[str, float] = field(default_factory=dict)
    load: dict[str, float] = field(default_factory=dict)


SCALARS = tuple(f.name for f in fields(Sample) if f.name not in ("at", "clouds", "load"))
_PEAKS = {"ttft_p95_s", "queued"}
"""Of a minute the worst second is kept, where a mean would hide it."""


class History:
    def __init__(self, keep: Callable[[int, Sample], None] = lambda minute, sample: None) -> None:
        """`keep` is given each minute that is complete; it must not block."""
        self._seconds: deque[Sample] = deque(maxlen=SECONDS_KEPT)
        self._minutes: deque[Sample] = deque(maxlen=MINUTES_KEPT)
        self._this_minute: list[Sample] = []
        self._keep = keep

    def add(self, sample: Sample) -> None:
        this = self._this_minute
        if this and int(sample.at // 60) != int(this[0].at // 60):
            minute = int(this[0].at // 60)
            folded = fold(this, minute * 60.0)
            self._minutes.append(folded)
            self._keep(minute, folded)
            this.clear()
        if len(this) < 120:
            this.append(sample)
        self._seconds.append(sample)

    def restore(self, minutes: Iterable[Sample]) -> None:
        """What an earlier process kept, oldest first."""
        self._minutes.extendleft(reversed(list(minutes)))

    def seconds(self, since: float = 0.0) -> list[Sample]:
        return [sample for sample in self._seconds if sample.at > since]

    def minutes(self, since: float = 0.0) -> list[Sample]:
        """The minute that is not over yet comes last, as far as it is."""
        this = self._this_minute
        running = [fold(this, this[0].at // 60 * 60)] if this else []
        return [sample for sample in (*self._minutes, *running) if sample.at > since]


def fold(samples: Sequence[Sample], at: float) -> Sample:
    """Many samples as one: rates as their mean, waits and loads as their worst."""
    figures: dict[str, Any] = {}
    for name in SCALARS:
        known = [value for sample in samples if (value := getattr(sample, name)) is not None]
        merge = max if name in _PEAKS else fmean
        figures[name] = round(merge(known), 4) if known else None
    clouds = {cloud for sample in samples for cloud in sample.clouds}
    sites = {site for sample in samples for site in sample.load}
    return Sample(
        at=at,
        clouds={c: round(fmean(s.clouds.get(c, 0.0) for s in samples), 3) for c in clouds},
        load={name: max(s.load[name] for s in samples if name in s.load) for name in sites},
        **figures,
    )


def columns(samples: Sequence[Sample]) -> dict[str, Any]:
    """The same figures by name, each as long as `at`: a third of the bytes, and what a plot wants."""
    found: dict[str, Any] = {"at": [sample.at for sample in samples]}
    for name in SCALARS:
        found[name] = [getattr(sample, name) for sample in samples]
    for name in ("clouds", "load"):
        keys = sorted({key for sample in samples for key in getattr(sample, name)})
        found[name] = {key: [getattr(sample, name).get(key) for sample in samples] for key in keys}
    return found
