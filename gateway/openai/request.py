"""Defines the request into which all formats read a body, checks it and builds its queries."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import msgspec

from gateway.decision import PlacementLimits
from gateway.domain import Caller, Model, Query, Sampling, needs
from gateway.errors import BadRequest, ContextTooLong, NoSite
from gateway.openai.fields import UNSUPPORTED, WRONG_VALUE, Fields
from gateway.prompt import EMBED, RERANK, Prompt, least_chars

MAX_CONVERSATION_CHARS = 200
"""Longer names of conversations are truncated."""
RETRY_AFTER_S = 1.0
_TRACEPARENT = re.compile(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


class StreamOptions(msgspec.Struct, frozen=True):
    """`include_usage`: a last chunk has the answer's usage; `continuous_usage`: every chunk has it."""

    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False


class GenerationRequest(msgspec.Struct, frozen=True):
    """A request in any format.

    `limit_field` is the client's name for `sampling.max_tokens`. If it is empty, a value above the model's
    context is not refused and means as many tokens as fit. `prompt_field` is the client's name for the
    prompt. `field_names` maps other fields of a chat to the names that the format has for them.

    `repeated` holds the fields of the request that the response repeats, in the format of the response.
    `custom_tools` names the functions that stand for custom tools of a chat. `conversation` is the client's
    name of the conversation, empty if it gives none.
    """

    model: str
    prompts: tuple[Prompt, ...]
    sampling: Sampling
    limit_field: str
    stream_options: StreamOptions
    priority: int
    repeated: Mapping[str, object] = msgspec.field(default_factory=dict)
    prompt_field: str = "messages"
    field_names: Mapping[str, str] = msgspec.field(default_factory=dict)
    custom_tools: frozenset[str] = frozenset()
    conversation: str = ""

    @property
    def choices(self) -> int:
        return len(self.prompts) * self.sampling.n


def read_stream_options(fields: Fields) -> StreamOptions:
    stream = fields.flag("stream")
    options = fields.child("stream_options")
    if options is None:
        return StreamOptions(stream)
    if not stream:
        fields.refuse("stream_options", "is only allowed with 'stream': true")
    include_usage = options.flag("include_usage")
    return StreamOptions(stream, include_usage, options.flag("continuous_usage_stats") and include_usage)


_FEATURES = {
    "tools": ("tools", "call functions", "leave 'tools' out, or set 'tool_choice' to \"none\""),
    "logprobs": ("logprobs", "tell log probabilities", "leave '{}' out"),
    "template_kwargs": (
        "chat_template_kwargs",
        "pass arguments to its chat template",
        "leave 'chat_template_kwargs' out",
    ),
    EMBED: ("model", "make embeddings", f"ask a model with the feature '{EMBED}'"),
    RERANK: ("model", "rank documents", f"ask a model with the feature '{RERANK}'"),
    "vision": ("", "see images", "send text alone"),
    "image_urls": ("", "fetch images from addresses", "send images as data URLs in base64"),
    "guided": ("response_format", "hold an answer to a JSON schema", "leave '{}' out"),
}


def check_model(
    request: GenerationRequest, models: Sequence[Model], tenant: str, *, fleet_complete: bool = True
) -> None:
    """Raise BadRequest if no site of the model can serve the request, or NoSite while sites may still join.

    Unknown models and those of other tenants are not checked.
    """
    model = next((m for m in models if m.id == request.model and m.tenant in ("", tenant)), None)
    if model is None:
        return
    try:
        _check_max_tokens(request, model)
        _check_prompts(request, model)
        _check_features(request, model)
    except BadRequest as exc:
        if fleet_complete:
            raise
        reason = f"{exc} This gateway has just started, and sites may still join."
        raise NoSite(reason, retry_after_s=RETRY_AFTER_S) from exc


def _check_max_tokens(request: GenerationRequest, model: Model) -> None:
    """Raise BadRequest if `max_tokens` exceeds the model's context, whatever the prompt.

    The site clips a smaller value that does not fit beside the prompt.
    """
    max_tokens = request.sampling.max_tokens
    if max_tokens is None or not request.limit_field or max_tokens <= model.context_tokens:
        return
    raise BadRequest(
        f"'{request.limit_field}' is {max_tokens}, but the context of {model.id} is"
        f" {model.context_tokens} tokens, prompt and answer together.",
        param=request.limit_field,
        code=WRONG_VALUE,
    )


def _check_prompts(request: GenerationRequest, model: Model) -> None:
    """Raise ContextTooLong for a prompt that can't fit any site's context, by its token ids or by the least
    number of its characters, so that no site has to tokenize it.
    """
    for prompt in request.prompts:
        ids = len(prompt) if isinstance(prompt, tuple) else 0
        if ids >= model.context_tokens > 0:
            found = f"The prompt has {ids} tokens"
        elif model.max_prompt_chars and least_chars(prompt) > model.max_prompt_chars:
            found = f"The prompt has more than {model.max_prompt_chars} characters"
        else:
            continue
        raise ContextTooLong(
            f"{found}, but the context of {model.id} is {model.context_tokens} tokens,"
            " prompt and answer together.",
            param=request.prompt_field,
        )


def _check_features(request: GenerationRequest, model: Model) -> None:
    needed = needs(request.prompts[0], request.sampling)
    if model.features and model.features <= {EMBED, RERANK} and not needed & {EMBED, RERANK}:
        can = " and ".join(_FEATURES[feature][1] for feature in sorted(model.features))
        raise BadRequest(f"{model.id} can {can}, and generates no text.", param="model", code=UNSUPPORTED)
    for feature, (param, what, instead) in _FEATURES.items():
        if feature in needed and feature not in model.features:
            name = request.field_names.get(param, param)
            raise BadRequest(
                f"No site that serves {model.id} can {what}; {instead.format(name)}."
                " /v1/models lists what models can do.",
                param=name or request.prompt_field,
                code=UNSUPPORTED,
            )


def build_queries(
    request: GenerationRequest,
    caller: Caller,
    *,
    query_id: str,
    request_id: str,
    received_s: float,
    timeout_s: float,
    traceparent: str,
    limits: PlacementLimits | None = None,
    session: str = "",
) -> list[Query]:
    """Build one query per prompt. If there are several, the id of each ends with the number of its prompt.

    `session` is the name of the conversation from a header. It precedes the name in the body, which whole
    applications share.
    """
    several = len(request.prompts) > 1
    return [
        Query(
            id=f"{query_id}-{number}" if several else query_id,
            model=request.model,
            prompt=prompt,
            sampling=request.sampling,
            caller=caller,
            received_s=received_s,
            deadline_s=received_s + timeout_s,
            priority=max(request.priority, caller.best_priority),
            limits=limits,
            request_id=request_id,
            traceparent=traceparent if traceparent and _TRACEPARENT.fullmatch(traceparent) else "",
            together=len(request.prompts),
            conversation=(session or request.conversation)[:MAX_CONVERSATION_CHARS],
        )
        for number, prompt in enumerate(request.prompts)
    ]
