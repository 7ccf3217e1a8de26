"""White space without end, which small models fall into, costs as much per token as any other text."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from site_engine.core.request import Thinking
from site_engine.text import thinking, tool_call_parser
from site_engine.text.detokenize import overlap
from site_engine.text.parsed_answer import ParsedAnswer
from site_engine.text.tool_format import GLM, HERMES, LLAMA, MISTRAL, QWEN_XML, Format

TOKENS = 500
SPACE = " \n\t "


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of the texts that were searched for the beginning of a mark."""
    lengths: list[int] = []

    def recorded(text: str, mark: str) -> int:
        lengths.append(len(text))
        return overlap(text, mark)

    for module in (thinking, tool_call_parser):
        monkeypatch.setattr(module, "overlap", recorded)
    return lengths


@pytest.mark.parametrize("form", [HERMES, QWEN_XML, GLM, MISTRAL, LLAMA], ids=lambda form: form.name)
@pytest.mark.parametrize("last", ["so", "<tool_cal", ""])
def test_in_text_that_a_call_may_follow(form: Format, last: str, looked_at: list[int]) -> None:
    parser = tool_call_parser.answer_parser(form, {"f": {}}, ParsedAnswer(single=False, new_id=str))
    parts = ["Well", *[SPACE] * TOKENS, last]
    said = "".join(parser.feed(each).text for each in parts) + parser.end().text
    assert said == "".join(parts)
    assert max(looked_at) <= len(SPACE) + len(last)


class Words:
    """Decodes the token of a number to the word at this place."""

    def __init__(self, *words: str) -> None:
        self.push: Callable[[int], str] = words.__getitem__


@pytest.mark.parametrize("first", ["Hm", ""])
@pytest.mark.parametrize("last", ["so", "</thin", "", "</think>"])
def test_in_a_thought(first: str, last: str, looked_at: list[int]) -> None:
    parts = [first, *[SPACE] * TOKENS, last]
    decoder = thinking.ThinkingDecoder(Words(*parts), Thinking("<think>", "</think>", opened=True))
    text = "".join(map(decoder.push, range(len(parts)))) + decoder.end()
    assert (text, decoder.take()) == ("", "".join(parts).removesuffix("</think>").strip())
    assert max(looked_at, default=0) <= len(SPACE) + len(last)
