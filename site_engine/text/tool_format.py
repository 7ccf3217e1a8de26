"""Tool call formats of models, and the detection of the format from the chat template."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from site_engine.text.call_syntax import CallSyntax, JsonSyntax, NamedSyntax
from site_engine.text.harmony import Harmony
from site_engine.text.tagged_call import TaggedSyntax


@dataclass(frozen=True, slots=True)
class Format:
    """A format that encloses calls in marks, either each call or a list of all calls.

    `begins`: the marks that start calls within text. Grammars use the first one. A mark that equals the
    syntax's `start` is part of the call. `bare`: an answer may also start with a call without a mark.
    `ends_thought`: the mark of a call that models may write without ending their reasoning first.
    `id_chars`: the length of call ids, without `id_prefix`.
    """

    name: str
    begins: tuple[str, ...]
    end: str
    syntax: CallSyntax
    between: str = "\n"
    opening: str = ""  # after the begin mark
    closing: str = ""  # before `end`
    bare: bool = False
    is_list: bool = False
    ends_thought: str = ""
    id_prefix: str = "call_"
    id_chars: int = 24

    @property
    def marks(self) -> tuple[str, ...]:
        """The marks that may be special tokens."""
        return tuple(filter(None, (*self.begins, self.end, *self.syntax.marks)))


HERMES = Format(
    "hermes",
    ("<tool_call>",),
    "</tool_call>",
    JsonSyntax(),
    opening="\n",
    closing="\n",
    ends_thought="<tool_call>",
)
QWEN_XML = Format(
    "qwen_xml",
    ("<tool_call>", "<function="),  # models sometimes omit the first
    "</tool_call>",
    TaggedSyntax(
        start="<function=",
        name_end=">",
        key="<parameter=",
        key_end=">",
        value="",
        value_end="</parameter>",
        call_end="</function>",
        after_call="</tool_call>",
        lines=True,
    ),
    opening="\n",
    closing="\n",
    ends_thought="<tool_call>",
)
GLM = Format(
    "glm",
    ("<tool_call>",),
    "",
    TaggedSyntax(
        start="",
        name_end="",
        key="<arg_key>",
        key_end="</arg_key>",
        value="<arg_value>",
        value_end="</arg_value>",
        call_end="</tool_call>",
        after_call="<tool_call>",
    ),
    ends_thought="<tool_call>",
)
_MISTRAL_IDS: dict[str, Any] = {"id_prefix": "", "id_chars": 9}
MISTRAL = Format(
    "mistral", ("[TOOL_CALLS]",), "]", JsonSyntax(), ", ", opening="[", is_list=True, **_MISTRAL_IDS
)
MISTRAL_ARGS = Format(
    "mistral_args", ("[TOOL_CALLS]",), "", NamedSyntax("[ARGS]", "[CALL_ID]"), "", **_MISTRAL_IDS
)
LLAMA = Format("llama", ("<|python_tag|>",), "", JsonSyntax("parameters"), "; ", bare=True)

HARMONY = Harmony()

AnswerFormat: TypeAlias = Format | Harmony

_SIGNS: tuple[tuple[AnswerFormat | str, tuple[str, ...]], ...] = (
    ("DeepSeek", ("<｜tool▁calls▁begin｜>",)),
    ("DeepSeek", ("｜DSML｜",)),
    ("Kimi", ("<|tool_calls_section_begin|>",)),
    ("Gemma", ("<|tool_call>",)),
    (HARMONY, ("<|channel|>", "<|message|>")),
    (MISTRAL_ARGS, ("[TOOL_CALLS]", "[ARGS]")),
    (MISTRAL, ("[TOOL_CALLS]",)),
    (QWEN_XML, ("<tool_call>", "<function=")),
    (GLM, ("<tool_call>", "<arg_key>")),
    (HERMES, ("<tool_call>",)),
    (LLAMA, ('"parameters": dictionary of argument name',)),
)
"""Formats, or names of unsupported model families, with strings in their templates. The first entry whose
strings are all in the template applies.
"""


class Recognition(NamedTuple):
    """The tool call format of a chat template. Without one, `refusal` is the reason for rejecting tools."""

    form: AnswerFormat | None
    refusal: str = ""


def chat_template(tokenizer: Any) -> str:
    """Return the chat template, or an empty string if there is none. Of several, prefer the one for tools."""
    found = getattr(tokenizer, "chat_template", None)
    if isinstance(found, dict):
        found = found.get("tool_use") or found.get("default")
    return found or ""


def recognize(template: str) -> Recognition:
    if "tools" not in template:
        return Recognition(None, "this model's chat template takes no tools")
    found = next((form for form, signs in _SIGNS if all(sign in template for sign in signs)), None)
    if isinstance(found, AnswerFormat):
        return Recognition(found)
    form = "in a form that is not known here" if found is None else f"as {found} does, a form not read here"
    return Recognition(None, f"this model's chat template teaches calls {form}")


def hidden_marks(marks: Iterable[str], tokenizer: Any) -> dict[int, str]:
    """Return the marks that are special tokens, and thus omitted from decoded text, by token id."""
    known = tokenizer.get_vocab()
    found = {known[mark]: mark for mark in marks if mark in known}
    return {at: mark for at, mark in found.items() if not tokenizer.decode([at], skip_special_tokens=True)}
