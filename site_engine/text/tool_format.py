"""Formats in which models write calls of functions, and the signs of the chat templates that teach them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from site_engine.text.call_syntax import CallSyntax, JsonSyntax, NamedSyntax
from site_engine.text.harmony import Harmony
from site_engine.text.tagged_call import TaggedSyntax


@dataclass(frozen=True, slots=True)
class Format:
    """Calls stand between marks: each for itself, or all of them in one list.

    `begins`: the marks that begin calls within text, the first of them the one of grammars; a mark with which
    the call's syntax starts is part of the call. `bare`: an answer may also open with a call, without a mark.
    `ends_thought`: the mark that models also write without ending their thought. `id_chars`: length of the
    ids.
    """

    name: str
    begins: tuple[str, ...]
    end: str
    syntax: CallSyntax
    between: str = "\n"
    opening: str = ""  # after the mark
    closing: str = ""  # before `end`
    bare: bool = False
    is_list: bool = False
    ends_thought: str = ""
    id_prefix: str = "call_"
    id_chars: int = 24

    @property
    def marks(self) -> tuple[str, ...]:
        """All marks that may be special tokens."""
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
    ("<tool_call>", "<function="),  # the first is left out at times
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
"""Formats, or families whose calls are not read here, with the signs of their templates. The first counts of
which all signs are there.
"""


class Recognition(NamedTuple):
    """The format that a chat template teaches; without one `refusal` says why there are no tools."""

    form: AnswerFormat | None
    refusal: str = ""


def chat_template(tokenizer: Any) -> str:
    """Return the chat template, empty if there is none; of several, the one for tools."""
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
    """Return those of `marks` that are special tokens, which text leaves out, by token id."""
    known = tokenizer.get_vocab()
    found = {known[mark]: mark for mark in marks if mark in known}
    return {at: mark for at, mark in found.items() if not tokenizer.decode([at], skip_special_tokens=True)}
