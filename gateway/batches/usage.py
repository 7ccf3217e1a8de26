"""Reads what the answers of a batch took from the lines of its output file, whichever endpoint they ask."""

from __future__ import annotations

import logging
from typing import Any, Final

import msgspec

from gateway.bounded_json import DECODE_ERRORS
from gateway.domain import Usage

log = logging.getLogger(__name__)


class _Details(msgspec.Struct, frozen=True):
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    thinking_tokens: int = 0


_NONE: Final = _Details()


class _Usage(msgspec.Struct, frozen=True):
    """The fields of OpenAI's completions, of its responses, and Anthropic's, whose `input_tokens` leave out
    what was cached.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details = _NONE
    completion_tokens_details: _Details = _NONE
    input_tokens: int = 0
    output_tokens: int = 0
    input_tokens_details: _Details = _NONE
    output_tokens_details: _Details = _NONE
    cache_read_input_tokens: int = 0


class _Body(msgspec.Struct):
    usage: _Usage = _Usage()


class _Response(msgspec.Struct):
    body: _Body


class _Line(msgspec.Struct):
    response: _Response


_LINES: Final = msgspec.json.Decoder(_Line)


def usage_of(line: bytes) -> Usage:
    """Return the usage of the answer in a line of an output file: none if it can't be read, since a batch
    must end whatever its lines hold, such as arguments nested as deep as a decoder goes.
    """
    try:
        usage = _LINES.decode(line).response.body.usage
    except DECODE_ERRORS as exc:
        log.warning("the usage of a batch leaves out a line that can't be read: %s", exc)
        return Usage(0, 0)
    read = (usage.prompt_tokens_details, usage.input_tokens_details)
    written = (usage.completion_tokens_details, usage.output_tokens_details)
    return Usage(
        prompt_tokens=usage.prompt_tokens + usage.input_tokens + usage.cache_read_input_tokens,
        completion_tokens=usage.completion_tokens + usage.output_tokens,
        cached_tokens=usage.cache_read_input_tokens + sum(each.cached_tokens for each in read),
        reasoning_tokens=sum(each.reasoning_tokens + each.thinking_tokens for each in written),
    )


def batch_usage(usage: Usage) -> dict[str, Any]:
    """Render the `usage` of OpenAI's batch object."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.total_tokens,
    }
