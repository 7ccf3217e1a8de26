"""Bodies that nest as deeply as can just be decoded, where a response repeats what nests."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.side_work import INLINE_BYTES
from tests.support.fakes.edge import MODEL, Edge, run

NESTED = "NESTED"
ADD = {"type": "function", "name": "add"}


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [ADD | {"parameters": NESTED}]},
        {"tools": [{"type": "custom", "name": "c", "format": {"type": "grammar", "more": NESTED}}]},
        {"tools": [ADD], "tool_choice": {"type": "function", "name": "add", "more": NESTED}},
        {"text": {"format": {"type": "json_schema", "name": "n", "schema": NESTED}}},
    ],
)
def test_what_a_response_repeats_is_refused_where_it_nests_too_deeply(fields: dict[str, Any]) -> None:
    """Bodies of this size are decoded on another thread, with less of the stack in use than later."""
    body = json.dumps({"model": MODEL, "input": "x" * INLINE_BYTES, **fields})

    async def scenario(edge: Edge) -> None:
        for depth in range(840, 1000, 4):
            nested = '{"a":' * depth + "1" + "}" * depth
            response = await edge.post("/v1/responses", body.replace(f'"{NESTED}"', nested).encode())
            assert response.status_code in (200, 400), depth

    run(scenario)
