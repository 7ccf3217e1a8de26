"""Who forecasts lengths: the shipped predictor, the oracle with and without noise, and what peers do.

Each sees queries in the order of their arrival and learns, if it does, from the lengths of earlier ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import ceil, log2
from random import Random

from mico.errors import CommandFailed, ExitCode
from mico.simulation.queries import Expected, Query, demand_of
from predictor.forecast import Forecast
from site_engine.core.request import RemainingCurve, RemainingPoint

LONGEST = 16_384
KNOWN_AFTER = 64
"""A learning estimator knows the length of a query this many arrivals later: answers take time."""
Estimator = Callable[[Sequence[Query]], list[Forecast]]


def shipped(queries: Sequence[Query]) -> list[Forecast]:
    """The predictor that gateways run, on the texts."""
    from predictor.onnx_forecaster import Features, load

    asked = list(dict.fromkeys(Features(query.text, query.model) for query in queries))
    known = dict(zip(asked, load().forecast(asked), strict=True))
    return [known[Features(query.text, query.model)] for query in queries]


def oracle(queries: Sequence[Query]) -> list[Forecast]:
    return [exactly(query.response_tokens, "oracle") for query in queries]


def noisy(share: float) -> Estimator:
    """The true length times a factor drawn evenly from 1 - share to 1 + share."""

    def forecast(queries: Sequence[Query]) -> list[Forecast]:
        random = Random(1)
        factors = [1 + share * (2 * random.random() - 1) for _ in queries]
        pairs = zip(queries, factors, strict=True)
        return [exactly(query.response_tokens * factor, f"noisy:{share:g}") for query, factor in pairs]

    return forecast


def constant(queries: Sequence[Query]) -> list[Forecast]:
    """One length for all: the mean of the first answers."""
    first = queries[: 4 * KNOWN_AFTER]
    mean = sum(query.response_tokens for query in first) / max(1, len(first))
    return [exactly(mean, "constant")] * len(queries)


def of_input(queries: Sequence[Query]) -> list[Forecast]:
    """1.5 times the prompt, as a router of Kubernetes guesses."""
    return [exactly(1.5 * query.prompt_tokens, "input") for query in queries]


def histogram(queries: Sequence[Query]) -> list[Forecast]:
    """The lengths answered lately to prompts of like size, log2 of it (AIBrix)."""
    return _by_class(queries, lambda query: int(log2(1 + query.prompt_tokens)), "histogram")


def bins(queries: Sequence[Query]) -> list[Forecast]:
    """Three classes of prompts, short, middle and long, and the lengths answered lately in each (llm-d)."""
    return _by_class(queries, lambda query: (query.prompt_tokens > 64) + (query.prompt_tokens > 1024), "bins")


def _by_class(queries: Sequence[Query], of: Callable[[Query], int], name: str) -> list[Forecast]:
    edges = (0, *(2**i for i in range(15)))
    counts: dict[int, list[float]] = {}
    found = []
    for number, query in enumerate(queries):
        if number >= KNOWN_AFTER:
            known = queries[number - KNOWN_AFTER]
            bucket = min(len(edges) - 2, ceil(log2(max(1, known.response_tokens))))
            counts.setdefault(of(known), [0.1] * (len(edges) - 1))[bucket] += 1
        weights = counts.get(of(query), [1.0] * 11 + [0.0] * (len(edges) - 12))
        total = sum(weights)
        found.append(Forecast(edges, tuple(weight / total for weight in weights), name))
    return found


def exactly(tokens: float, source: str) -> Forecast:
    length = min(LONGEST, max(1, round(tokens)))
    if length == 1:
        return Forecast((0, 1), (1.0,), source)
    return Forecast((0, length - 1, length), (0.0, 1.0), source)


ESTIMATORS: Mapping[str, Estimator] = {
    "shipped": shipped,
    "oracle": oracle,
    "constant": constant,
    "input": of_input,
    "histogram": histogram,
    "bins": bins,
}


def estimator(name: str) -> Estimator:
    """By name; `noisy:0.5` is off by up to half."""
    kind, _, share = name.partition(":")
    if kind == "noisy" and share.replace(".", "", 1).isdigit():
        return noisy(float(share))
    if name not in ESTIMATORS:
        raise CommandFailed(
            f"there is no estimator {name!r}",
            tip=f"choose of {', '.join(ESTIMATORS)}, noisy:SHARE",
            exit_code=ExitCode.WRONG_USAGE,
        )
    return ESTIMATORS[name]


def expectations(queries: Sequence[Query], forecasts: Sequence[Forecast]) -> dict[int, Expected]:
    """By a query's number: its forecast as gateway and site work with it; like ones are made once."""
    made: dict[tuple[object, ...], Expected] = {}
    found = {}
    for query, forecast in zip(queries, forecasts, strict=True):
        key = id(forecast), query.prompt_tokens, query.lane, query.regions
        if key not in made:
            curve = _curve(forecast)
            made[key] = Expected(forecast, demand_of(query, forecast), curve, curve.typical())
        found[query.number] = made[key]
    return found


def _curve(forecast: Forecast) -> RemainingCurve:
    """As the wire carries it to a site."""
    return RemainingCurve(tuple(RemainingPoint(*point) for point in forecast.remaining_curve()))
