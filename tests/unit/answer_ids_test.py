"""Whatever an answer's id begins with, operators find its query by it."""

from __future__ import annotations

from gateway.batches.answer_line import ENDPOINTS
from gateway.openai.pooling_format import RERANK
from gateway.openai.sampling import MAX_CHOICES
from gateway.store.queries import ANSWER_PREFIXES, MAX_PROMPTS


def test_the_ids_of_every_format_are_known() -> None:
    assert {RERANK.id_prefix, *(each.id_prefix for each in ENDPOINTS.values())} == set(ANSWER_PREFIXES)
    assert MAX_PROMPTS == MAX_CHOICES
