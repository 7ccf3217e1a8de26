"""Generate Lark grammars of answers that call functions, match a schema or may do either."""

from __future__ import annotations

from collections.abc import Callable

from site_engine.errors import NotServed, Reason
from site_engine.messages import Tools
from site_engine.text.call_syntax import Schema, json_rule, parameters_rule, quoted
from site_engine.text.harmony import CHANNEL, CONSTRAIN, END, MESSAGE, START, Harmony
from site_engine.text.tool_format import AnswerFormat, Format

_ANYTHING = "/(.|\\n)*/"


def guided_source(
    schema: Schema | None,
    tools: Tools | None,
    form: AnswerFormat | None,
    literal: Callable[[str], str],
) -> str:
    """Return the Lark source of an answer's grammar, empty if unconstrained. `literal` quotes text.

    Raises NotServed if the parameters of a function can't be enforced in this format.
    """
    if isinstance(form, Harmony):
        return harmony_source(schema, tools, literal)
    if tools is None or form is None:
        return "" if schema is None else f"start: answer\nanswer: {json_rule(schema)}\n"
    if not tools.forced and schema is None and not tools.strict:
        return ""
    rules = call_rules(tools, form, literal)
    if tools.forced:
        return f"start: calls\n{rules}"
    if schema is not None:
        return f"start: calls | answer\nanswer: {json_rule(schema)}\n{rules}"
    return free_text_rules(tools, form, literal) + rules


def free_text_rules(tools: Tools, form: Format, literal: Callable[[str], str]) -> str:
    """Return the rules of free text in which any text that starts like a call must be a valid call."""
    if form.bare:
        return f"start: calls | TEXT\nTEXT: /([^{{ \\t\\n]{_ANYTHING[1:-1]})?/\n"
    begin = literal(form.begins[0])
    if begin.startswith("<["):  # a special token, which cannot occur in text
        return f"start: TEXT calls?\nTEXT: {_ANYTHING}\n"
    others = "|".join(form.begins[1:])  # excluded: calls must use the first mark
    text = f"{_ANYTHING} & ~/(.|\\n)*({others})(.|\\n)*/" if others else _ANYTHING
    times = "?" if tools.single else "*"
    return f"start: (lead rest){times} TEXT\nlead[lazy]: TEXT {begin}\nTEXT: {text}\n"


def call_rules(tools: Tools, form: Format, literal: Callable[[str], str]) -> str:
    """Return the rules `calls`, which starts with the begin mark, and `rest`, which follows the mark."""
    begin, end = "" if form.bare else literal(form.begins[0]), literal(form.end) if form.end else ""
    between, opening, closing = (quoted(each) for each in (form.between, form.opening, form.closing))
    if form.is_list:
        call, again = "object", f"{between} object"
        rest = f'" "? {opening} {call}{{}} {closing} {end}'
    else:
        call = f"{opening} object {closing} {end}"
        again, rest = f"{between} {begin} {call}", f"{call}{{}}"
    functions = tools.callable
    rules = [
        f"calls: {begin} rest",
        "rest: " + rest.format("" if tools.single else f" ({again})*"),
        "object: " + " | ".join(f"object_{number}" for number in range(len(functions))),
    ]
    each = (
        form.syntax.rules(f"object_{number}", function, literal) for number, function in enumerate(functions)
    )
    return "\n".join(rules) + "\n" + "".join(each)


def harmony_source(schema: Schema | None, tools: Tools | None, literal: Callable[[str], str]) -> str:
    """Return the source for messages in channels. Reasoning may precede the constrained content."""
    if schema is None and (tools is None or not (tools.forced or tools.strict)):
        return ""
    channel, message, end, start, constrain = map(literal, (CHANNEL, MESSAGE, END, START, CONSTRAIN))
    if not channel.startswith("<["):
        reason = "the marks of channels are no tokens of their own in this model's vocabulary"
        raise NotServed(Reason.UNSUPPORTED, f"an answer can't be held to a grammar: {reason}", "tools")
    rules = [
        f'thought: {channel} "analysis" {message} TEXT {end} {start} "assistant"',
        f'preamble: {channel} "commentary" {message} TEXT {end} {start} "assistant"',
        f'final: {channel} "final" {message} answer',
        f"answer: {'TEXT' if schema is None else json_rule(schema)}",
        f"TEXT: {_ANYTHING}",
    ]
    if tools is None:
        return "\n".join(["start: thought? final", *rules]) + "\n"
    for number, function in enumerate(tools.callable):
        header = quoted(f"commentary to=functions.{function['name']} ")
        rules.append(f'call_{number}: {channel} {header} {constrain} "json" {message} arguments_{number}')
        rules.append(f"arguments_{number}: {parameters_rule(function)}")
    calls = " | ".join(f"call_{number}" for number in range(len(tools.callable)))
    if tools.forced:
        body = f"thought? ({calls})"
    else:
        body = f"(thought | preamble)* (final | {calls})" if schema is None else f"thought? (final | {calls})"
    return "\n".join([f"start: {body}", *rules]) + "\n"
