"""Build the HTTP request of an attempt for a server of the OpenAI API; refuse fields it would not honour."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from site_engine.core.request import Sampling
from site_engine.errors import NotServed, Reason
from site_engine.messages import (
    Assign,
    ChatMessage,
    ChatPrompt,
    PoolingPrompt,
    TextPrompt,
    TokenPrompt,
    ToolChoice,
    Tools,
)
from site_engine.remote.abilities import EMBED, RERANK
from site_engine.remote.dialects import Dialect, EffortStyle
from site_engine.remote.resume import continue_from_text
from site_engine.text.template_arguments import NEAREST_EFFORTS, NO_REASONING, effort_arguments, switches

CHARS_PER_TOKEN = 4
TOKENS_PER_MESSAGE = 4
_EXTRAS: Mapping[str, Any] = {
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "min_tokens": 0,
    "ignore_eos": False,
    "stop_token_ids": (),
}
"""Fields that OpenAI does not have, with the values that turn them off."""
_OFF = Sampling()
"""OpenAI's fields with the values that turn them off."""
_HAVE_DEFAULTS = frozenset({"top_k", "min_p", "repetition_penalty"})
"""Those that a server may turn on by itself."""


class HttpRequest(NamedTuple):
    """`delivered`: tokens of the answer that the client has already, which the server reads as prompt."""

    path: str
    body: Mapping[str, Any]
    delivered: int = 0
    pooling: PoolingPrompt | None = None


def build_request(assign: Assign, model: str, dialect: Dialect) -> HttpRequest:
    """Build the request; `model` as the server calls it. Raises NotServed with the field in question."""
    if isinstance(assign.prompt, PoolingPrompt):
        return pooling_request(assign.prompt, model, dialect)
    check_honoured(assign, dialect)
    assign = continue_from_text(assign, dialect)
    body: dict[str, Any] = {
        "model": model,
        "stream": True,
        "stream_options": {"include_usage": True},
        **sampling_fields(assign.sampling, dialect),
    }
    if dialect.continuous_usage:
        body["stream_options"]["continuous_usage_stats"] = True
    if assign.choices > 1:
        body["n"] = assign.choices
    if isinstance(assign.prompt, ChatPrompt):
        body["messages"] = [message_fields(each, dialect) for each in assign.prompt.messages]
        body |= tool_fields(assign.prompt.tools) | response_format(assign.guided_json)
        body |= reasoning_fields(assign.prompt, dialect)
        if assign.resumed_text:
            body |= dialect.continue_fields or {}
        if assign.sampling.logprobs is not None:
            body |= {"logprobs": True, "top_logprobs": assign.sampling.logprobs}
        return HttpRequest("/v1/chat/completions", body, assign.resumed_tokens)
    prompt = assign.prompt
    assert isinstance(prompt, TextPrompt | TokenPrompt), "other prompts have bodies of their own"
    body["prompt"] = prompt.text if isinstance(prompt, TextPrompt) else list(prompt.token_ids)
    if assign.sampling.logprobs is not None:
        body["logprobs"] = assign.sampling.logprobs
    return HttpRequest("/v1/completions", body, assign.resumed_tokens)


def without_limit(request: HttpRequest) -> HttpRequest | None:
    """Return the request of a chat without its limit of tokens, None if it has none or is no chat."""
    if "messages" not in request.body or "max_tokens" not in request.body:
        return None
    return request._replace(body={name: each for name, each in request.body.items() if name != "max_tokens"})


def pooling_request(prompt: PoolingPrompt, model: str, dialect: Dialect) -> HttpRequest:
    """Ask for vectors in base64, which most servers know and the others ignore: they are a third as long."""
    body = {"model": model, **prompt.body}
    if prompt.task == EMBED:
        return HttpRequest("/v1/embeddings", {**body, "encoding_format": "base64"}, pooling=prompt)
    if prompt.task != RERANK:
        raise _unsupported(f"{prompt.task} is not known here", "model")
    if dialect.ranks_texts:
        return HttpRequest("/rerank", {"query": body["query"], "texts": body["documents"]}, pooling=prompt)
    return HttpRequest("/v1/rerank", body, pooling=prompt)


def guess_tokens(assign: Assign) -> int:
    """Guess the length of the prompt by four characters a token, until the server has counted."""
    if isinstance(assign.prompt, ChatPrompt):
        messages = assign.prompt.messages
        tools = assign.prompt.tools.offered if assign.prompt.tools else ()
        chars = sum(len(json.dumps(each)) for each in tools)
        texts = (len(each.content) + len(each.reasoning) for each in messages)
        content = sum(TOKENS_PER_MESSAGE + length // CHARS_PER_TOKEN for length in texts)
        return content + chars // CHARS_PER_TOKEN + assign.image_tokens
    if isinstance(assign.prompt, PoolingPrompt):
        return assign.prompt.tokens
    if isinstance(assign.prompt, TextPrompt):
        return 1 + len(assign.prompt.text) // CHARS_PER_TOKEN
    return len(assign.prompt.token_ids)


def check_honoured(assign: Assign, dialect: Dialect) -> None:
    for param, is_wanted in (
        ("tools", assign.tools is not None),
        ("response_format", bool(assign.guided_json)),
    ):
        if is_wanted and not dialect.guided:
            raise _unsupported(f"{param} is not known to be honoured by this server ({dialect.name})", param)
    tools = assign.tools
    for param, is_wanted in (
        ("n", assign.choices > 1),
        ("logit_bias", bool(assign.sampling.logit_bias)),
        ("presence_penalty", assign.sampling.presence_penalty != _OFF.presence_penalty),
        ("tool_choice", tools is not None and tools.forced),
        ("parallel_tool_calls", tools is not None and tools.single),
        ("prompt of token ids", isinstance(assign.prompt, TokenPrompt)),
    ):
        if is_wanted and param in dialect.drops:
            raise _unsupported(f"{param} is not honoured by this server ({dialect.name})", param.split()[0])
    if assign.guided_json and not isinstance(assign.prompt, ChatPrompt):
        raise _unsupported("only an answer to a chat can be held to a schema here", "response_format")
    if assign.echo and not isinstance(assign.prompt, TextPrompt):
        raise _unsupported("echo of a prompt of token ids needs a tokenizer, and this site has none", "echo")
    if assign.sampling.prompt_logprobs:
        raise _unsupported("this site has no log probabilities of the prompt", "echo")


def sampling_fields(sampling: Sampling, dialect: Dialect) -> dict[str, Any]:
    """Return the fields of what the client gave: the server has its own defaults for what was left out."""
    fields: dict[str, Any] = {
        name: getattr(sampling, name)
        for name in ("temperature", "top_p", "presence_penalty", "frequency_penalty")
        if name not in sampling.left_out
    }
    for name in dialect.omitted_defaults:
        if fields.get(name) == getattr(_OFF, name):
            del fields[name]
    for name in ("max_tokens", "seed"):
        if (value := getattr(sampling, name)) is not None:
            fields[name] = value
    if sampling.stop:
        fields["stop"] = list(sampling.stop)
    if sampling.logit_bias:
        fields["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
    if sampling.logprobs is not None and not dialect.logprobs:
        raise _unsupported("log probabilities of this server are not passed on", "logprobs")
    return fields | extra_fields(sampling, dialect)


def extra_fields(sampling: Sampling, dialect: Dialect) -> dict[str, Any]:
    """Return the fields that OpenAI does not have. Refuse one that the server may drop silently, unless the
    client turned it off: that is what most servers do by themselves.
    """
    extras: dict[str, Any] = {}
    for name, off in _EXTRAS.items():
        value = getattr(sampling, name)
        if name in sampling.left_out or (value == off and name not in dialect.extra_fields & _HAVE_DEFAULTS):
            continue
        if name not in dialect.extra_fields:
            raise _unsupported(f"{name} is not known to be honoured by this server ({dialect.name})", name)
        extras[name] = list(value) if isinstance(value, tuple) else value
    if extras.get("top_k") == 0:
        extras["top_k"] = -1  # what all servers read as off
    return extras


def response_format(schema: str) -> dict[str, Any]:
    if not schema:
        return {}
    parsed = json.loads(schema)
    if parsed == {"type": "object"}:
        return {"response_format": {"type": "json_object"}}
    named = {"name": "answer", "schema": parsed, "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": named}}


def tool_fields(tools: Tools | None) -> dict[str, Any]:
    if tools is None:
        return {}
    choice: Any = tools.choice.value
    if tools.choice is ToolChoice.NAMED:
        choice = {"type": "function", "function": {"name": tools.name}}
    fields = {"tools": list(tools.offered), "tool_choice": choice}
    return fields | {"parallel_tool_calls": False} if tools.single else fields


def reasoning_fields(prompt: ChatPrompt, dialect: Dialect) -> dict[str, Any]:
    """Return the fields of template arguments and of the effort, each as the server reads it."""
    kwargs, effort = prompt.template_kwargs, prompt.reasoning_effort
    if kwargs and not dialect.template_kwargs:
        message = f"chat_template_kwargs are not known to be honoured by this server ({dialect.name})"
        raise _unsupported(message, "chat_template_kwargs")
    fields: dict[str, Any] = {}
    if dialect.effort is EffortStyle.TEMPLATE:
        kwargs = {**effort_arguments(effort), **kwargs}
    elif effort and dialect.effort is EffortStyle.FIELD:
        fields["reasoning_effort"] = effort
    elif effort:
        fields["reasoning_effort"] = NEAREST_EFFORTS.get(effort, effort)
        if effort in NO_REASONING:
            kwargs = {**switches(effort), **kwargs}
    return {**fields, "chat_template_kwargs": kwargs} if kwargs else fields


def message_fields(message: ChatMessage, dialect: Dialect) -> dict[str, Any]:
    fields: dict[str, Any] = {"role": message.role, "content": message.parts or message.content}
    if message.name:
        fields["name"] = message.name
    if message.tool_calls_json:
        fields["tool_calls"] = json.loads(message.tool_calls_json)
    if message.tool_call_id:
        fields["tool_call_id"] = message.tool_call_id
    if message.reasoning:
        fields |= dict.fromkeys(dialect.reasoning_names, message.reasoning)
    return fields


def _unsupported(message: str, param: str) -> NotServed:
    return NotServed(Reason.UNSUPPORTED, message, param)
