"""Every row of the API's promises has a test that carries its number; here are those with no other home."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gateway.domain import Caller
from gateway.quotas.book import Shown
from gateway.quotas.limits import Kind
from tests.support.fakes.edge import Edge, error_of, get, post, run

ROWS = range(1, 81)
NUMBERED = re.compile(r"test_rows?_((?:\d+_(?:(?:to|and)_)?)+)")


def rows_of(name: str) -> set[int]:
    """The rows that the name of a test names: row_7, rows_7_8, rows_7_and_8, rows_7_to_9."""
    found = NUMBERED.match(name)
    if found is None:
        return set()
    spans = [range(int(a), int(b) + 1) for a, b in re.findall(r"(\d+)_to_(\d+)", found[1])]
    return {int(number) for number in re.findall(r"\d+", found[1])} | {row for span in spans for row in span}


def test_every_row_has_a_test() -> None:
    texts = [file.read_text() for file in Path(__file__).parents[1].rglob("*_test.py")]
    names = [name for text in texts for name in re.findall(r"^(?:async )?def (test_rows?_\w+)", text, re.M)]
    tested = {row for name in names for row in rows_of(name)}
    assert [row for row in ROWS if row not in tested] == []


def test_row_21_quotas_are_told_and_readable_from_a_page() -> None:
    def shown(_: Caller, kind: Kind) -> Shown | None:
        return Shown(9, 8, 360.0) if kind is Kind.REQUESTS else Shown(90, 0, 0.012)

    async def scenario(edge: Edge) -> None:
        headers = (await edge.chat()).headers
        told = {name[12:]: value for name, value in headers.items() if name.startswith("x-ratelimit-")}
        assert told == {
            "limit-requests": "9",
            "remaining-requests": "8",
            "reset-requests": "6m0s",
            "limit-tokens": "90",
            "remaining-tokens": "0",
            "reset-tokens": "12ms",
        }

    run(scenario, shown_quota=shown)


@pytest.mark.parametrize(
    ("path", "what"),
    [
        ("/v1/embeddings", "embeddings"),
        ("/v1/rerank", "reranking"),
        ("/v1/images/generations", "images"),
        ("/v1/audio/speech", "audio"),
        ("/v1/audio/transcriptions", "audio"),
        ("/v1/moderations", "moderation"),
        ("/v1/responses", "responses"),
    ],
)
def test_row_6_what_openai_has_and_this_gateway_has_not_is_named(path: str, what: str) -> None:
    for response in (post(path, {"model": "demo", "input": "x"})[0], get(path)):
        error = error_of(response, 404)
        assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", "not_found", None)
        assert what in error["message"]
        assert "/v1/chat/completions" in error["message"]


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_row_79_tokenizers_live_at_the_sites(path: str) -> None:
    error = error_of(post(path, {"model": "demo", "prompt": "x"})[0], 404)
    assert "tokenizers live at the sites" in error["message"]
