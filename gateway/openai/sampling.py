"""Reads the sampling fields that the formats share. Refuses fields that would silently have no effect."""

from __future__ import annotations

from gateway.domain import Sampling
from gateway.openai.fields import UNSUPPORTED, WRONG_TYPE, Fields, echo, whole_number

MAX_CHOICES = 128
MAX_STOPS = 4
MAX_STOP_CHARS = 256
"""Bounds the work of a site, which compares held-back text with all stop strings at each token."""
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIASES = 1024
MAX_COUNT = 2**31 - 1
MAX_TOKEN_ID = 2**32 - 1
MAX_TOKEN_IDS = 2**20
"""Maximum token ids of one prompt: more than any context."""

IGNORED_FIELDS = frozenset({"user", "metadata", "store", "service_tier", "safety_identifier"})
"""Fields that have no effect here; accepted with any value."""

UNSUPPORTED_FIELDS = frozenset(
    {
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
        "structured_outputs",
        "json_schema",
        "regex",
        "ebnf",
        "use_beam_search",
        "bad_words",
        "allowed_token_ids",
        "prompt_logprobs",
        "truncate_prompt_tokens",
        "lora_path",
        "cache_salt",
        "mm_processor_kwargs",
        "chat_template",
        "continue_final_message",
        "documents",
        "moderation",
    }
)
"""Extensions of other servers, and OpenAI's `moderation`, refused because they would silently have no
effect.
"""

MODEL_DEFAULTS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
"""Fields for which a model or server may have its own defaults, used if the client gives no value."""

SAMPLING_FIELDS = frozenset(
    {*MODEL_DEFAULTS, "min_tokens", "seed", "n", "stop", "stop_token_ids", "ignore_eos", "logit_bias"}
)
"""Fields that `read_sampling` reads; a request that has none of them leaves all to the defaults."""


def read_sampling(
    fields: Fields,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    echo_prompt: bool = False,
    guided_json: str = "",
) -> Sampling:
    if not fields.present(SAMPLING_FIELDS):
        return Sampling(
            max_tokens,
            logprobs=logprobs,
            echo=echo_prompt,
            guided_json=guided_json,
            left_out=MODEL_DEFAULTS,
        )
    min_tokens = fields.integer("min_tokens", 0, MAX_COUNT, 0)
    if max_tokens is not None and min_tokens > max_tokens:
        fields.refuse(
            "min_tokens", f"must not be above the {max_tokens} tokens asked for at most, got {min_tokens}"
        )
    seed = fields.integer("seed", -(2**63), 2**64 - 1, None)
    return Sampling(
        max_tokens=max_tokens,
        n=fields.integer("n", 1, MAX_CHOICES, 1),
        temperature=fields.number("temperature", 0, 2, 1.0),
        top_p=fields.number("top_p", 0, 1, 1.0),
        top_k=max(fields.integer("top_k", -1, MAX_COUNT, 0), 0),
        min_p=fields.number("min_p", 0, 1, 0.0),
        presence_penalty=fields.number("presence_penalty", -2, 2, 0.0),
        frequency_penalty=fields.number("frequency_penalty", -2, 2, 0.0),
        repetition_penalty=fields.number("repetition_penalty", 0.01, 10, 1.0),
        seed=None if seed is None else seed % 2**64,
        stop=_stop(fields),
        stop_token_ids=_stop_token_ids(fields),
        min_tokens=min_tokens,
        ignore_eos=fields.flag("ignore_eos"),
        logit_bias=_logit_bias(fields),
        logprobs=logprobs,
        echo=echo_prompt,
        guided_json=guided_json,
        left_out=left_out(fields),
    )


def left_out(fields: Fields) -> tuple[str, ...]:
    """Return those of MODEL_DEFAULTS that the request does not have."""
    return tuple(name for name in MODEL_DEFAULTS if fields.raw(name) is None)


def read_priority(fields: Fields) -> int:
    return fields.integer("priority", -(2**31), 2**31 - 1, 0)


def read_conversation(fields: Fields) -> str:
    """Return the client's name of the conversation, used to find sites that have its prefix cached."""
    name = fields.raw("prompt_cache_key")
    return name if isinstance(name, str) else ""


def refuse_unsupported(fields: Fields, names: frozenset[str]) -> None:
    """Refuse the fields `names`, unless their value is null, false or empty."""
    for name in fields.present(names):
        if fields.raw(name):
            fields.refuse(name, "is not supported yet; leave it out", UNSUPPORTED)
    fields.present(IGNORED_FIELDS)


def _stop(fields: Fields) -> tuple[str, ...]:
    value = fields.raw("stop")
    return stop_strings(
        fields, "stop", [value] if isinstance(value, str) else fields.items("stop"), MAX_STOPS
    )


def stop_strings(fields: Fields, name: str, items: list[object], most: int) -> tuple[str, ...]:
    """Read the strings of the list `name`, or none if there are more than `most`."""
    if len(items) > most:
        fields.refuse(name, f"holds at most {most} strings, got {len(items)}")
        return ()
    for number, item in enumerate(items):
        if not isinstance(item, str) or not item:
            message = f"must be a string of at least one character, got {echo(item)}"
            fields.refuse(f"{name}.{number}", message, WRONG_TYPE)
        elif len(item) > MAX_STOP_CHARS:
            message = f"has at most {MAX_STOP_CHARS} characters, got {len(item)}"
            fields.refuse(f"{name}.{number}", message)
    return tuple(item for item in items if isinstance(item, str))


def _stop_token_ids(fields: Fields) -> tuple[int, ...]:
    items = fields.items("stop_token_ids")
    if len(items) > MAX_STOP_TOKEN_IDS:
        fields.refuse("stop_token_ids", f"holds at most {MAX_STOP_TOKEN_IDS} ids, got {len(items)}")
        return ()
    return token_ids(fields, "stop_token_ids", items)


def token_ids(fields: Fields, name: str, items: list[object]) -> tuple[int, ...]:
    """Read token ids up to the first invalid one, so that a long prompt of invalid ids is one problem."""
    if len(items) > MAX_TOKEN_IDS:
        fields.refuse(name, f"holds at most {MAX_TOKEN_IDS} token ids, got {len(items)}")
        return ()
    if set(map(type, items)) == {int} and min(items) >= 0 and max(items) <= MAX_TOKEN_ID:  # type: ignore[type-var, operator]
        return tuple(items)  # type: ignore[arg-type]
    ids: list[int] = []
    for number, item in enumerate(items):
        token = whole_number(item)
        if token is None or not 0 <= token <= MAX_TOKEN_ID:
            fields.refuse(f"{name}.{number}", f"must be a token id, got {echo(item)}", WRONG_TYPE)
            break
        ids.append(token)
    return tuple(ids)


def _logit_bias(fields: Fields) -> dict[int, float]:
    biases = fields.child("logit_bias")
    if biases is None:
        return {}
    names = biases.unread()
    if len(names) > MAX_LOGIT_BIASES:
        fields.refuse("logit_bias", f"holds at most {MAX_LOGIT_BIASES} tokens, got {len(names)}")
        return {}
    return {
        token: biases.number(name, -100, 100, 0.0)
        for name in names
        if (token := _read_token_id(biases, name)) is not None
    }


def _read_token_id(biases: Fields, name: str) -> int | None:
    if name.isascii() and name.isdecimal() and len(name) <= 10 and int(name) <= MAX_TOKEN_ID:
        return int(name)
    biases.refuse(name[:20], "is not a token id", WRONG_TYPE)
    return None
