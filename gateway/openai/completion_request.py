"""Reads the body of POST /v1/completions: a text, token ids, or several prompts of one kind."""

from __future__ import annotations

from gateway.openai.fields import UNSUPPORTED, WRONG_TYPE, Fields, echo
from gateway.openai.request import GenerationRequest, read_stream_options
from gateway.openai.sampling import (
    MAX_CHOICES,
    MAX_COUNT,
    UNSUPPORTED_FIELDS,
    read_conversation,
    read_priority,
    read_sampling,
    refuse_unsupported,
    token_ids,
)
from gateway.prompt import Prompt

DEFAULT_MAX_TOKENS = 16
MAX_LOGPROBS = 5
REFUSED_FIELDS = UNSUPPORTED_FIELDS | {"suffix", "response_format"}


def read_completion(fields: Fields) -> GenerationRequest:
    model = fields.required_text("model")
    prompts = _prompts(fields)
    max_tokens = fields.integer("max_tokens", 0, MAX_COUNT, DEFAULT_MAX_TOKENS)
    refuse_unsupported(fields, REFUSED_FIELDS)
    logprobs = fields.integer("logprobs", 0, MAX_LOGPROBS, None)
    sampling = read_sampling(
        fields, max_tokens=max_tokens, logprobs=logprobs, echo_prompt=fields.flag("echo")
    )
    if fields.integer("best_of", 1, MAX_CHOICES, sampling.n) != sampling.n:
        fields.refuse("best_of", f"can only equal 'n', which is {sampling.n}", UNSUPPORTED)
    request = GenerationRequest(
        model,
        prompts,
        sampling,
        "max_tokens",
        read_stream_options(fields),
        read_priority(fields),
        conversation=read_conversation(fields),
        prompt_field="prompt",
    )
    if request.choices > MAX_CHOICES:
        fields.refuse(
            "prompt", f"and 'n' ask for {request.choices} choices; one request gives at most {MAX_CHOICES}"
        )
    return request


def _prompts(fields: Fields) -> tuple[Prompt, ...]:
    value = fields.required("prompt")
    if value is None:
        return ()
    if value in ("", []):
        fields.refuse("prompt", "must not be empty")
        return ()
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        fields.refuse(
            "prompt", f"must be a string, token ids, or a list of either, got {echo(value)}", WRONG_TYPE
        )
        return ()
    return _prompt_list(fields, value)


def _prompt_list(fields: Fields, items: list[object]) -> tuple[Prompt, ...]:
    """Read a list of texts, of lists of token ids, or of token ids; the first item decides which."""
    first = items[0]
    if isinstance(first, str | list) and len(items) > MAX_CHOICES:
        fields.refuse("prompt", f"holds at most {MAX_CHOICES} prompts, got {len(items)}")
        return ()
    if isinstance(first, str):
        return tuple(_text(fields, number, item) for number, item in enumerate(items))
    if isinstance(first, list):
        return tuple(_token_ids(fields, number, item) for number, item in enumerate(items))
    return (token_ids(fields, "prompt", items),)


def _text(fields: Fields, number: int, item: object) -> str:
    if isinstance(item, str) and item:
        return item
    fields.refuse(
        f"prompt.{number}", f"must be a string of at least one character, got {echo(item)}", WRONG_TYPE
    )
    return ""


def _token_ids(fields: Fields, number: int, item: object) -> tuple[int, ...]:
    if isinstance(item, list) and item:
        return token_ids(fields, f"prompt.{number}", item)
    fields.refuse(
        f"prompt.{number}", f"must be a list of at least one token id, got {echo(item)}", WRONG_TYPE
    )
    return ()
