"""Keep the samples of the plots, bounded: 15 minutes at one a second, a day at one a minute."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from heapq import nlargest
from operator import itemgetter
from statistics import fmean
from typing import Any

SECONDS_KEPT = 15 * 60
MINUTES_KEPT = 24 * 60
PLOTTED_SITES = 200
"""Maximum number of sites in a sample and in a plot, the most loaded ones: bounds them, whatever joins."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One point of every plot. `at` is unix time; `load` is outstanding / capacity by site.

    None means unmeasured: a gap in the plot, never a zero.
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
"""Columns of which a minute keeps the worst second: a mean would hide it."""


class History:
    """Samples of the last minutes and of the last day."""

    def __init__(self, on_minute: Callable[[int, Sample], None] = lambda minute, sample: None) -> None:
        """`on_minute` receives each complete minute (unix time / 60) and its sample; it must not block."""
        self._seconds: deque[Sample] = deque(maxlen=SECONDS_KEPT)
        self._minutes: deque[Sample] = deque(maxlen=MINUTES_KEPT)
        self._minute_samples: list[Sample] = []
        self._on_minute = on_minute

    def add(self, sample: Sample) -> None:
        """Add the newest sample. Those that are after it go: the clock was set back since."""
        minute_samples = self._minute_samples
        for kept in (self._seconds, minute_samples):
            while kept and kept[-1].at > sample.at:
                kept.pop()
        while self._minutes and self._minutes[-1].at >= sample.at // 60 * 60:
            self._minutes.pop()
        if minute_samples and int(sample.at // 60) != int(minute_samples[0].at // 60):
            minute = int(minute_samples[0].at // 60)
            folded = fold(minute_samples, minute * 60.0)
            self._minutes.append(folded)
            self._on_minute(minute, folded)
            minute_samples.clear()
        if len(minute_samples) < 120:
            minute_samples.append(sample)
        self._seconds.append(sample)

    def restore(self, minutes: Iterable[Sample]) -> None:
        """Restore the minutes that an earlier process stored, oldest first."""
        self._minutes.extendleft(reversed(list(minutes)))

    def seconds(self, since: float = 0.0) -> list[Sample]:
        """Return the samples of single seconds after `since`."""
        return [sample for sample in self._seconds if sample.at > since]

    def minutes(self, since: float = 0.0) -> list[Sample]:
        """Return the samples of minutes after `since`; the running minute comes last, incomplete."""
        minute_samples = self._minute_samples
        running = [fold(minute_samples, minute_samples[0].at // 60 * 60)] if minute_samples else []
        return [sample for sample in (*self._minutes, *running) if sample.at > since]


def fold(samples: Sequence[Sample], at: float) -> Sample:
    """Merge samples into one: rates by mean, waits and loads by maximum."""
    merged: dict[str, Any] = {}
    for name in SCALARS:
        known = [value for sample in samples if (value := getattr(sample, name)) is not None]
        merge = max if name in _PEAKS else fmean
        merged[name] = round(merge(known), 4) if known else None
    clouds = {cloud for sample in samples for cloud in sample.clouds}
    return Sample(
        at=at,
        clouds={c: round(fmean(s.clouds.get(c, 0.0) for s in samples), 3) for c in clouds},
        load=_busiest([sample.load for sample in samples]),
        **merged,
    )


def columns(samples: Sequence[Sample]) -> dict[str, Any]:
    """Return the samples by column, as plots use them; a third of the bytes of rows.

    Of more than PLOTTED_SITES sites those that were loaded most: machines of pools come and go under hundreds
    of names a day.
    """
    found: dict[str, Any] = {"at": [sample.at for sample in samples]}
    for name in SCALARS:
        found[name] = [getattr(sample, name) for sample in samples]
    for name in ("clouds", "load"):
        values = [getattr(sample, name) for sample in samples]
        found[name] = {key: [each.get(key) for each in values] for key in sorted(_busiest(values))}
    return found


def _busiest(values: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the greatest values of names, of at most PLOTTED_SITES names."""
    peaks: dict[str, float] = {}
    for each in values:
        for name, value in each.items():
            peaks[name] = max(value, peaks.get(name, value))
    return dict(nlargest(PLOTTED_SITES, peaks.items(), key=itemgetter(1)))
