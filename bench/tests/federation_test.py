"""The federation bench on refusals and on texts that differ."""

from __future__ import annotations

from pathlib import Path

import openai
import pytest

from bench.federation import Kept, answer_or_none, first_difference
from gateway.errors import BadRequest, ContextTooLong
from tests.support.fakes.edge import MODEL, Edge, fail, run


@pytest.mark.parametrize("number", [0, 1])
def test_a_prompt_that_is_too_long_is_counted_and_any_other_refusal_ends_the_run(number: int) -> None:
    async def too_long(edge: Edge) -> None:
        assert await answer_or_none(edge.sdk, MODEL, "hello", number, 9) is None

    async def wrong(edge: Edge) -> None:
        with pytest.raises(openai.BadRequestError):
            await answer_or_none(edge.sdk, MODEL, "hello", number, 9)

    run(too_long, fail(ContextTooLong("9 > 8.")))
    run(wrong, fail(BadRequest("Not so.")))


def test_texts_part_at_the_first_token_that_only_one_has() -> None:
    assert first_difference("abX", ["a", "ab", "abc", "abcd"]) == 2
    assert first_difference("X", ["a", "ab"]) == 0
    assert first_difference("ab and more", ["a", "ab"]) == 1


def test_kept_texts_belong_to_one_model_and_length(tmp_path: Path) -> None:
    Kept.read(tmp_path / "texts.json", "a, 32 tokens").add("prompt", "text")
    assert Kept.read(tmp_path / "texts.json", "a, 32 tokens").texts == {"prompt": "text"}
    assert Kept.read(tmp_path / "texts.json", "a, 64 tokens").texts == {}
    assert Kept.read(None, "a, 32 tokens").texts == {}
