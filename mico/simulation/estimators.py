"""Estimators of response lengths: the shipped predictor, an oracle with or without noise, simple baselines.

Each sees queries in the order of arrival; those that learn do so from the lengths of earlier queries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import ceil, log2
from random import Random

from mico.errors import CommandFailed, ExitCode
from mico.simulation.queries import Expected, Query, demand_of
from predictor.forecast import Forecast
from site_engine.core.remaining_curve import RemainingCurve, RemainingPoint

MAX_TOKENS = 16_384
LEARNING_DELAY = 64
"""A learning estimator sees the length of a query this many arrivals later, because answers take time."""
Estimator = Callable[[Sequence[Query]], list[Forecast]]


def shipped(queries: Sequence[Query]) -> list[Forecast]:
    """Forecast with the predictor that gateways run, on the texts."""
    from predictor.onnx_forecaster import Features, load

    features = list(dict.fromkeys(Features(query.text, query.model) for query in queries))
    known = dict(zip(features, load().forecast(features), strict=True))
    return [known[Features(query.text, query.model)] for query in queries]


def oracle(queries: Sequence[Query]) -> list[Forecast]:
    """Forecast the true lengths."""
    return [point_forecast(query.response_tokens, "oracle") for query in queries]


def noisy(share: float) -> Estimator:
    """Return an estimator of the true length times a factor drawn uniformly from 1 - share to 1 + share."""

    def forecast(queries: Sequence[Query]) -> list[Forecast]:
        random = Random(1)
        factors = [1 + share * (2 * random.random() - 1) for _ in queries]
        pairs = zip(queries, factors, strict=True)
        return [point_forecast(query.response_tokens * factor, f"noisy:{share:g}") for query, factor in pairs]

    return forecast


def constant(queries: Sequence[Query]) -> list[Forecast]:
    """Forecast one length for all queries, the mean of the first answers."""
    first = queries[: 4 * LEARNING_DELAY]
    mean = sum(query.response_tokens for query in first) / max(1, len(first))
    return [point_forecast(mean, "constant")] * len(queries)


def of_input(queries: Sequence[Query]) -> list[Forecast]:
    """Forecast 1.5 times the prompt, the guess of a Kubernetes router."""
    return [point_forecast(1.5 * query.prompt_tokens, "input") for query in queries]


def histogram(queries: Sequence[Query]) -> list[Forecast]:
    """Forecast the recent lengths of answers to prompts of similar size by log2, as AIBrix does."""
    return _from_recent_lengths(queries, lambda query: int(log2(1 + query.prompt_tokens)), "histogram")


def bins(queries: Sequence[Query]) -> list[Forecast]:
    """Forecast the recent lengths of answers in one of three classes of prompt length, as llm-d does."""
    return _from_recent_lengths(
        queries, lambda query: (query.prompt_tokens > 64) + (query.prompt_tokens > 1024), "bins"
    )


def _from_recent_lengths(
    queries: Sequence[Query], class_of: Callable[[Query], int], name: str
) -> list[Forecast]:
    edges = (0, *(2**i for i in range(15)))
    counts: dict[int, list[float]] = {}
    found = []
    for number, query in enumerate(queries):
        if number >= LEARNING_DELAY:
            known = queries[number - LEARNING_DELAY]
            bucket = min(len(edges) - 2, ceil(log2(max(1, known.response_tokens))))
            counts.setdefault(class_of(known), [0.1] * (len(edges) - 1))[bucket] += 1
        weights = counts.get(class_of(query), [1.0] * 11 + [0.0] * (len(edges) - 12))
        total = sum(weights)
        found.append(Forecast(edges, tuple(weight / total for weight in weights), name))
    return found


def point_forecast(tokens: float, source: str) -> Forecast:
    """Return a forecast that is certain of one length."""
    length = min(MAX_TOKENS, max(1, round(tokens)))
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
    """Return the estimator of a name; `noisy:0.5` is off by up to half. Raises CommandFailed."""
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
    """Return forecasts by the query's number in the forms for gateway and site; equal ones are shared."""
    cache: dict[tuple[object, ...], Expected] = {}
    found = {}
    for query, forecast in zip(queries, forecasts, strict=True):
        key = id(forecast), query.prompt_tokens, query.lane, query.regions
        if key not in cache:
            points = (RemainingPoint(*point) for point in forecast.remaining_curve())  # as on the wire
            curve = RemainingCurve(tuple(points))
            cache[key] = Expected(forecast, demand_of(query, forecast), curve, curve.typical())
        found[query.number] = cache[key]
    return found
