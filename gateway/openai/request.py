"""What a client asked for, read from either endpoint's body, and the queries it becomes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from gateway.domain import Caller, Model, Query, Sampling, needs
from gateway.errors import BadRequest
from gateway.openai.fields import UNSUPPORTED, WRONG_VALUE, Fields
from gateway.prompt import Prompt

_TRACEPARENT = re.compile(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


@dataclass(frozen=True, slots=True)
class Streaming:
    """How the answer comes. `usage`: a last chunk counts tokens; `usage_in_each`: every chunk does."""

    on: bool = False
    usage: bool = False
    usage_in_each: bool = False


@dataclass(frozen=True, slots=True)
class Asked:
    """`limit_field` is the name under which the client gave `sampling.max_tokens`."""

    model: str
    prompts: tuple[Prompt, ...]
    sampling: Sampling
    limit_field: str
    streaming: Streaming
    priority: int

    @property
    def choices(self) -> int:
        return len(self.prompts) * self.sampling.n


def read_streaming(fields: Fields) -> Streaming:
    on = fields.flag("stream")
    options = fields.child("stream_options")
    if options is None:
        return Streaming(on)
    if not on:
        fields.refuse("stream_options", "is only allowed with 'stream': true")
    usage = options.flag("include_usage")
    return Streaming(on, usage, options.flag("continuous_usage_stats") and usage)


_ABILITIES = {
    "tools": ("tools", "call functions", "leave 'tools' out, or set 'tool_choice' to \"none\""),
    "logprobs": ("logprobs", "tell log probabilities", "leave 'logprobs' out"),
    "guided": ("response_format", "hold an answer to a JSON schema", "leave 'response_format' out"),
}


def check_model(asked: Asked, models: Sequence[Model]) -> None:
    """Refuses what no site that serves the model can do. Passes unknown models."""
    model = next((m for m in models if m.id == asked.model), None)
    if model is not None:
        _check_limit(asked, model)
        _check_abilities(asked, model)


def _check_limit(asked: Asked, model: Model) -> None:
    """A wish that no prompt leaves room for. Less than that the site clips."""
    wanted = asked.sampling.max_tokens
    if wanted is None or wanted <= model.context_tokens:
        return
    raise BadRequest(
        f"'{asked.limit_field}' is {wanted}, but the context of {model.id} is {model.context_tokens} tokens,"
        " prompt and answer together.",
        param=asked.limit_field,
        code=WRONG_VALUE,
    )


def _check_abilities(asked: Asked, model: Model) -> None:
    for ability in sorted(needs(asked.prompts[0], asked.sampling) & _ABILITIES.keys()):
        if ability not in model.features:
            param, what, instead = _ABILITIES[ability]
            raise BadRequest(
                f"No site that serves {model.id} can {what}; {instead}. /v1/models lists what models can do.",
                param=param,
                code=UNSUPPORTED,
            )


def queries(
    asked: Asked,
    caller: Caller,
    *,
    query_id: str,
    request_id: str,
    received_s: float,
    timeout_s: float,
    traceparent: str,
) -> list[Query]:
    """One query for each prompt; several carry the prompt's number in their id."""
    several = len(asked.prompts) > 1
    return [
        Query(
            id=f"{query_id}-{number}" if several else query_id,
            model=asked.model,
            prompt=prompt,
            sampling=asked.sampling,
            caller=caller,
            received_s=received_s,
            deadline_s=received_s + timeout_s,
            priority=max(asked.priority, caller.best_priority),
            request_id=request_id,
            traceparent=traceparent if _TRACEPARENT.fullmatch(traceparent) else "",
        )
        for number, prompt in enumerate(asked.prompts)
    ]
