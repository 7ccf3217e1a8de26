"""The bytes of a prompt's tokens are those of the echoed text, whatever the tokenizer adds."""

from __future__ import annotations

import pytest

from site_engine.core.request import TokenLogprob
from site_engine.federation.attempts import text_of_prompt


@pytest.mark.parametrize(
    ("names", "echo", "expected"),
    [
        (["<s>", "Hello", " you"], "Hello you", ["", "Hello", " you"]),
        (["<s>", " Hello", " you"], "Hello you", ["", "Hello", " you"]),
        (["<s>", "Hello"], "<s>Hello", ["<s>", "Hello"]),
        (["<s>", "<s>", "Hello"], "<s>Hello", ["", "<s>", "Hello"]),
        (["<s>", "hello"], "HELLO", ["<s>", "hello"]),
        (["Hello", " you"], "Hello you", ["Hello", " you"]),
    ],
    ids=["bos", "bos and no first space", "written out", "bos and written out", "another spelling", "no bos"],
)
def test_tokens_have_the_bytes_that_they_add_to_the_echo(
    names: list[str], echo: str, expected: list[str]
) -> None:
    placed = text_of_prompt([TokenLogprob(name, name.encode(), None) for name in names], echo)
    assert [token.token for token in placed] == names
    assert [token.raw.decode() for token in placed] == expected
