"""Reads the reasoning effort, the arguments of the chat template, and the reasoning of earlier turns."""

from __future__ import annotations

import msgspec

from gateway.openai.fields import UNSUPPORTED, Fields, echo

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
MAX_KWARGS_BYTES = 1 << 16
_RESERVED = frozenset(
    {"chat_template", "tokenize", "add_generation_prompt", "continue_final_message", "messages", "tools"}
)
"""Arguments that clients may not set: they replace the template or decide whether it is applied."""
_ALWAYS_ON = frozenset(
    {"include_reasoning", "separate_reasoning", "stream_reasoning", "add_generation_prompt"}
)


def read_effort(owner: Fields, name: str) -> str:
    """Return the effort, empty if the request has none. 'max' becomes 'xhigh', the highest for sites."""
    effort = owner.raw(name)
    if effort is None:
        return ""
    if not isinstance(effort, str) or effort not in EFFORTS:
        owner.refuse(name, f"must be one of {', '.join(EFFORTS)}, got {echo(effort)}")
        return ""
    return "xhigh" if effort == "max" else effort


def read_template_kwargs(fields: Fields) -> str:
    """Return `chat_template_kwargs` as JSON, empty if there are none."""
    kwargs = fields.child("chat_template_kwargs")
    if kwargs is None:
        return ""
    for name in kwargs.present(_RESERVED):
        kwargs.refuse(name, "is not for clients to decide", UNSUPPORTED)
    encoded = msgspec.json.encode(fields.raw("chat_template_kwargs"))
    if len(encoded) > MAX_KWARGS_BYTES:
        fields.refuse("chat_template_kwargs", f"is longer than {MAX_KWARGS_BYTES} bytes")
        return ""
    return "" if encoded == b"{}" else encoded.decode()


def refuse_hidden_reasoning(fields: Fields) -> None:
    """Refuse extensions of other servers that leave reasoning out or mix it with the text."""
    for name in fields.present(_ALWAYS_ON):
        if fields.raw(name) not in (None, True):
            fields.refuse(name, "can only be true", UNSUPPORTED)


def read_earlier_reasoning(message: Fields) -> str:
    """Return an assistant's reasoning, from `reasoning` or else `reasoning_content`."""
    reasoning = message.text("reasoning")
    return reasoning or message.text("reasoning_content")
