"""What the lines of an output file say of usage, and that no line keeps a batch from ending."""

from __future__ import annotations

import pytest

from gateway.batches.answer_line import response_line
from gateway.batches.usage import usage_of
from gateway.domain import Usage

NESTED = b'{"usage":{"input_tokens":3},"content":[{"input":' + b'{"a":' * 5_000 + b"1" + b"}" * 5_000 + b"}]}"


def test_what_was_read_from_the_cache_is_part_of_an_anthropic_prompt() -> None:
    body = b'{"usage":{"input_tokens":3,"output_tokens":2,"cache_read_input_tokens":4}}'
    assert usage_of(response_line("c", "q", body)) == Usage(7, 2, cached_tokens=4)


@pytest.mark.parametrize(
    "body", [b"{}", b"null", b'{"usage":null}', b'{"usage":{"input_tokens":null}}', NESTED], ids=lambda _: ""
)
def test_a_line_that_says_nothing_readable_counts_nothing(body: bytes) -> None:
    assert usage_of(response_line("c", "q", body)) == Usage(0, 0)
