"""Says what lines of a file have in common before it is submitted. Asks no site and forecasts nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gateway.batches.answer_line import ENDPOINTS
from gateway.batches.groups import PrefixGroups, sharing
from gateway.batches.reading import RawLine, read_line
from gateway.batches.values import BatchLimits
from gateway.domain import Caller
from gateway.openai.fields import Fields, Problems
from gateway.openai.request import build_queries
from gateway.routing.prefixes import prefix_of


class Preview(NamedTuple):
    """`groups`: those of two lines or more. Tokens are guesses; `shared_tokens` need not be computed if the
    lines of each group run one after another.
    """

    lines: int
    groups: int
    grouped_lines: int
    prompt_tokens: int
    shared_tokens: int


def preview(path: Path, endpoint: str, limits: BatchLimits) -> Preview:
    """Read a file of requests. Raises InvalidLine, and BadRequest for a body that the endpoint refuses."""
    found, tokens = PrefixGroups(), list[int]()
    for raw in _raw_lines(path):
        problems = Problems()
        request = ENDPOINTS[endpoint].read(Fields(read_line(raw, endpoint, limits).body, problems))
        problems.raise_any()
        queries = build_queries(
            request,
            Caller("", ""),
            query_id="",
            request_id="",
            received_s=0.0,
            timeout_s=1.0,
            traceparent="",
        )
        found.add(prefix_of(queries[0].prompt, "", request.model))
        tokens.append(sum(query.prompt_tokens_guess for query in queries))
    groups, lines, shared_tokens = sharing(found.find(), np.array(tokens, np.int64))
    return Preview(len(tokens), groups, lines, sum(tokens), shared_tokens)


def _raw_lines(path: Path) -> Iterator[RawLine]:
    begins = 0
    with path.open("rb") as file:
        for number, data in enumerate(file, 1):
            if data.strip():
                yield RawLine(number, begins, data.rstrip(b"\r\n"))
            begins += len(data)
