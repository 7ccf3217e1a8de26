"""Queries of a run: arrivals and lengths from a trace or at random, texts from the corpus. Needs pandas.

Only held-out prompts of the corpus are used, so that the shipped predictor never saw the texts in training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from gateway.domain import Lane
from mico.errors import CommandFailed
from mico.simulation import prompts
from mico.simulation.day import times_s
from mico.simulation.queries import Query
from predictor.data import dataset
from predictor.errors import DataError

TENANTS = 8
ALPACA = ("alpaca", "text-davinci-003")
NEAREST = 16
"""A query of a trace gets one of this many texts on either side whose answers are nearest in length."""


def corpus(path: Path) -> pd.DataFrame:
    """Return the held-out rows by answer length; prompts without a count have four characters a token.

    Raises CommandFailed for a missing file, and DataError for one without held-out prompts.
    """
    if not path.exists():
        raise CommandFailed(
            f"{path} is not there",
            tip="name with --corpus a parquet file, or the folder where a gateway keeps its `outcomes`",
        )
    held_out = dataset.split(dataset.read(path)).held_out
    if held_out.empty:
        raise DataError(f"{path} has no held-out prompts, and only those are used")
    if "prompt_tokens" not in held_out.columns:
        held_out["prompt_tokens"] = 1 + held_out.prompt.str.len() // 4
    return held_out.sort_values("response_tokens", kind="stable").reset_index(drop=True)


def from_trace(
    path: Path, texts: pd.DataFrame, max_queries: int, seed: int, *, first: int = 0, prefixes: bool = False
) -> list[Query]:
    """Return `max_queries` queries of a trace from the `first` on, each with a text whose answer was about as
    long.

    With `prefixes` their prompts share the blocks that the trace names in `prefix_block_ids`, or none.
    Raises CommandFailed for a missing file, and for times and counts that are no numbers.
    """
    if not path.exists():
        raise CommandFailed(f"{path} is not there", tip="name a trace file, poisson, burst, agents or day")
    rows = pd.read_parquet(path).sort_values("arrival_s", kind="stable")
    rows = rows.iloc[first : first + max_queries]
    try:
        arrivals_s = rows.arrival_s.astype(float).to_numpy()
        prompt_tokens, response_tokens = (
            rows[name].astype(np.int64).to_numpy() for name in ("prompt_tokens", "response_tokens")
        )
    except (TypeError, ValueError) as error:
        raise CommandFailed(f"{path} is no trace", cause=str(error)) from error
    if not np.isfinite(arrivals_s).all():
        raise CommandFailed(f"{path} is no trace", cause="it has an arrival_s that is no number")
    random = np.random.default_rng(seed)
    drawn = _as_long(texts, response_tokens, random)
    queries = _queries(arrivals_s, prompt_tokens, response_tokens, drawn, random)
    if not prefixes:
        return queries
    if "prefix_block_ids" not in rows.columns or rows.prefix_block_ids.isna().any():
        return prompts.unshared(queries)
    return prompts.with_blocks(queries, [each.tolist() for each in rows.prefix_block_ids])


def _as_long(
    texts: pd.DataFrame, response_tokens: NDArray[np.int64], random: np.random.Generator
) -> pd.DataFrame:
    """Draw texts whose answers were about as long as these."""
    places = np.searchsorted(texts.response_tokens.to_numpy(), response_tokens)
    return texts.iloc[np.clip(places + random.integers(-NEAREST, NEAREST, len(places)), 0, len(texts) - 1)]


def agents(texts: pd.DataFrame, count: int, seed: int) -> list[Query]:
    """Return the calls of agents (`prompts.agents`), each with a text whose answer was about as long."""
    calls = prompts.agents(count, seed)
    lengths = np.array([call.response_tokens for call in calls])
    drawn = _as_long(texts, lengths, np.random.default_rng(seed))
    return [
        replace(call, text=text, model=model)
        for call, text, model in zip(calls, drawn.prompt, drawn.model, strict=True)
    ]


def poisson(texts: pd.DataFrame, count: int, seed: int) -> list[Query]:
    """Return queries that arrive as a Poisson process, one a second on average."""
    random = np.random.default_rng(seed)
    return _from_corpus(texts, np.cumsum(random.exponential(1.0, count)), random)


def burst(texts: pd.DataFrame, count: int, seed: int) -> list[Query]:
    """Return queries that arrive all at once."""
    return _from_corpus(texts, np.zeros(count), np.random.default_rng(seed))


def day(texts: pd.DataFrame, count: int, seed: int) -> list[Query]:
    """Return queries that arrive over 24 hours: nine times as many a second at 14:00 as at 2:00."""
    random = np.random.default_rng(seed)
    return _from_corpus(texts, times_s(count, random), random)


def _from_corpus(
    texts: pd.DataFrame, arrivals_s: NDArray[np.float64], random: np.random.Generator
) -> list[Query]:
    """Draw queries from Alpaca's prompts where the corpus has them, else from all."""
    alpaca = texts[(texts.source == ALPACA[0]) & (texts.model == ALPACA[1])]
    rows = texts if alpaca.empty else alpaca
    drawn = rows.iloc[random.integers(0, len(rows), len(arrivals_s))]
    return _queries(
        arrivals_s, drawn.prompt_tokens.to_numpy(), drawn.response_tokens.to_numpy(), drawn, random
    )


def _queries(
    arrivals_s: NDArray[np.float64],
    prompt_tokens: NDArray[np.int64],
    response_tokens: NDArray[np.int64],
    texts: pd.DataFrame,
    random: np.random.Generator,
) -> list[Query]:
    tenants = random.integers(0, TENANTS, len(arrivals_s)).tolist()
    rows = zip(
        arrivals_s.tolist(),
        prompt_tokens.tolist(),
        response_tokens.tolist(),
        texts.prompt,
        texts.model,
        tenants,
        strict=True,
    )
    return [
        Query(number, arrival, max(1, prompt), max(1, response), text, model, f"t{tenant}")
        for number, (arrival, prompt, response, text, model, tenant) in enumerate(rows)
    ]


def assign_classes(queries: Sequence[Query], batch_share: float, bound: Mapping[str, float]) -> list[Query]:
    """Make a share of the queries lines of batches, and bind shares of all to one region each.

    The draw depends on the query's number alone, so that every run of a comparison has the same.
    """
    if not (batch_share or bound):
        return list(queries)
    random = np.random.default_rng(1)
    lines = random.random(len(queries)) < batch_share
    places = np.searchsorted(np.cumsum(list(bound.values())), random.random(len(queries)), side="right")
    regions = [*(frozenset({region}) for region in bound), None]
    return [
        replace(query, lane=Lane.BATCH if is_line else Lane.INTERACTIVE, regions=regions[region_index])
        for query, is_line, region_index in zip(queries, lines.tolist(), places.tolist(), strict=True)
    ]


def at_rate(queries: Sequence[Query], per_second: float) -> list[Query]:
    """Return the queries with their arrivals scaled to `per_second` on average."""
    first, last = queries[0].arrival_s, queries[-1].arrival_s
    if last <= first:
        return list(queries)
    stretch = (len(queries) - 1) / per_second / (last - first)
    return [replace(query, arrival_s=(query.arrival_s - first) * stretch) for query in queries]
