"""Conversations in which functions are called, made up for the demo model's training data.

Of a few dozen hand-written functions, whose names and parameters vary, and of any number of invented ones.
"""

import json
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

from mico.demo_model import facts
from mico.demo_model.function_families import (
    FAMILIES,
    INVENTED_SLOTS,
    OBJECTS,
    STRING,
    VERBS,
    Family,
    Slot,
    code,
    decimal,
    invented_word,
    noun,
    number,
    slot,
)

Message = dict[str, Any]
SHARE_WITHOUT_CALL = 0.2
SHARE_PARALLEL = 0.14  # go on to a second call, and of those to a third
SHARE_WITH_RESULT = 0.6
SHARE_GOING_ON = 0.2
SHARE_WITH_SYSTEM = 0.1
NO_ARGUMENT_ASKS = (
    "Call {fn}.",
    "Use {fn}.",
    "What is the value of {fn}()? Use the tool.",
    "What is {fn}()?",
)
ONE_ARGUMENT_ASKS = (
    "What is the value of {fn}({s})? Use the tool.",
    "Call {fn} with {s}.",
    "What is {fn}({s})?",
    "Use {fn} on {s}.",
    "Run {fn} for {s}",
)
NAMED_ARGUMENT_ASKS = (
    "Call {fn} with {s}.",
    "Use {fn}: {s}",
    "Please run {fn} with {s}",
    "{fn} for {s}, please.",
)


class Chat(NamedTuple):
    """A conversation as a chat template takes it: messages, and the functions that may be called."""

    messages: list[Message]
    tools: list[dict[str, Any]]


class Use(NamedTuple):
    """One function as offered, one request for it, the arguments that are right, and what comes of it."""

    tool: dict[str, Any]
    request: str
    arguments: dict[str, Any]
    result: Any
    saying: str


def draw_use(rng: random.Random, invented: float = 0.35) -> Use:
    """Draw a function and a request for it."""
    if rng.random() < invented:
        return _invented(rng)
    return _joke(rng) if rng.random() < 0.03 else _use(rng.choice(FAMILIES), rng)


def _joke(rng: random.Random) -> Use:
    """Return a joke told in parts, as clients that want structured answers ask for it."""
    setup, punchline = rng.choice(facts.JOKES).split("? ")
    slots = [("setup", slot("setup", STRING, noun)), ("punchline", slot("punchline", STRING, noun))]
    tool = _tool(rng.choice(("Joke", "joke", "tell_joke")), "Joke to tell user.", slots, rng)
    topic = noun(rng)
    request = rng.choice(
        (f"Tell me a joke about {topic}.", f"Tell me a joke about {topic}", "Tell me a joke.")
    )
    return Use(tool, request, {"setup": setup + "?", "punchline": punchline}, "ok", f"{setup}? {punchline}")


def _use(family: Family, rng: random.Random) -> Use:
    name = _styled(rng.choice(family.names), rng)
    values = {each.names[0]: each.draw(rng) for each in family.slots}
    renamed = {
        key: key if rng.random() < 0.5 else rng.choice(each.names)
        for key, each in zip(values, family.slots, strict=True)
    }
    ask = rng.choice(family.asks)
    spoken = {key: _spoken(value) for key, value in values.items()} | {"fn": name}
    said = {
        key
        for key, each in zip(values, family.slots, strict=True)
        if f"{{{key}}}" in ask or not each.optional
    }
    tool = _tool(
        name, rng.choice(family.descriptions), list(zip(renamed.values(), family.slots, strict=True)), rng
    )
    result = family.result(rng)
    arguments = {renamed[key]: value for key, value in values.items() if key in said}
    saying = rng.choice(family.says).format(**spoken, r=result)
    return Use(tool, ask.format(**spoken), arguments, result, saying)


def _invented(rng: random.Random) -> Use:
    name = _styled(f"{rng.choice((*VERBS, invented_word(rng)))}_{rng.choice(OBJECTS)}", rng)
    slots = rng.sample(INVENTED_SLOTS, rng.choice((0, 1, 1, 1, 2, 2, 3)))
    named = list({rng.choice(each.names): each for each in slots}.items())
    values = {key: each.draw(rng) for key, each in named}
    title = f"{name.replace('_', ' ').capitalize()}."
    description = rng.choice((title, "Applies a function to an input.", "Does what its name says."))
    tool = _tool(name, description, named, rng)
    request = _request_of(name, values, rng)
    draws = (number(0, 9999), decimal, invented_word, code, lambda r: {"result": r.randint(0, 999)})
    result = rng.choice(draws)(rng)
    shown = result["result"] if isinstance(result, dict) else result
    saying = rng.choice(("The result is {r}.", "{fn} returned {r}.")).format(fn=name, r=shown)
    return Use(tool, request, values, result, saying)


def _request_of(name: str, values: dict[str, Any], rng: random.Random) -> str:
    """Return a request that names the function and says all of its arguments."""
    ways = ("{k} {v}", "{k} = {v}", "the {k} {v}")
    said = " and ".join(rng.choice(ways).format(k=key, v=_spoken(value)) for key, value in values.items())
    asks: tuple[str, ...]
    if not values:
        asks = NO_ARGUMENT_ASKS
    elif len(values) == 1 and rng.random() < 0.6:
        asks, said = ONE_ARGUMENT_ASKS, _spoken(*values.values())
    else:
        asks = NAMED_ARGUMENT_ASKS
    return rng.choice(asks).format(fn=name, s=said)


def _tool(name: str, description: str, named: list[tuple[str, Slot]], rng: random.Random) -> dict[str, Any]:
    parameters: dict[str, Any] = {"type": "object", "properties": {key: each.schema for key, each in named}}
    parameters["required"] = [key for key, each in named if not each.optional]
    function: dict[str, Any] = {"name": name, "parameters": parameters}
    if rng.random() < 0.9:
        function["description"] = description
    return {"type": "function", "function": function}


def _styled(name: str, rng: random.Random) -> str:
    """Return the name in snake case, or at times in camel case or with a dash."""
    chance, parts = rng.random(), name.split("_")
    if chance < 0.1:
        return parts[0] + "".join(part.capitalize() for part in parts[1:])
    return "-".join(parts) if chance < 0.14 else name


def _spoken(value: Any) -> str:
    if isinstance(value, list):
        return f"{', '.join(value[:-1])} and {value[-1]}"
    if isinstance(value, dict):
        return " ".join(f"{key} {each}" for key, each in value.items())
    return str(value)


def draw_chat(rng: random.Random) -> Chat:
    """Draw a conversation with functions: one or more calls, none where none fits, often the answer after."""
    if rng.random() < SHARE_WITHOUT_CALL:
        tools = [draw_use(rng).tool for _ in range(rng.randint(1, 4))]
        return Chat(_turn(*_no_call(rng)), tools)
    uses = [draw_use(rng)]
    while len(uses) < 3 and rng.random() < SHARE_PARALLEL:
        uses.append(_alike(uses[0], rng))
    asked = rng.choice((" And ", " ", " Then: ", "\n")).join(use.request for use in uses)
    messages: list[Message] = [
        {"role": "user", "content": asked},
        {"role": "assistant", "tool_calls": [call_of(use) for use in uses]},
    ]
    if rng.random() < SHARE_WITH_RESULT:
        results = (use.result if isinstance(use.result, str) else json.dumps(use.result) for use in uses)
        messages += [{"role": "tool", "content": result} for result in results]
        messages.append({"role": "assistant", "content": " ".join(use.saying for use in uses)})
        if rng.random() < SHARE_GOING_ON:
            messages += _turn(*facts.draw_fact(rng))
    if rng.random() < SHARE_WITH_SYSTEM:
        messages.insert(0, {"role": "system", "content": "You are a helpful assistant."})
    return Chat(messages, offered_with(uses, rng.choice((0, 0, 1, 1, 2, 3, 4)), rng))


def offered_with(uses: list[Use], others: int, rng: random.Random) -> list[dict[str, Any]]:
    """Return the functions of these uses among others, in random order."""
    offered = {use.tool["function"]["name"]: use.tool for use in uses}
    for _ in range(others):
        other = draw_use(rng).tool
        offered.setdefault(other["function"]["name"], other)
    return rng.sample(list(offered.values()), len(offered))


def _turn(question: str, answer: str) -> list[Message]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _no_call(rng: random.Random) -> tuple[str, str]:
    """Return a question that no function is needed for: a calculator might be among those offered."""
    while True:
        question, answer = facts.draw_fact(rng)
        if not any(sign.isdigit() for sign in question) and "joke" not in question:
            return question, answer


def _alike(use: Use, rng: random.Random) -> Use:
    """Draw a request for another function, or for the same one with other arguments where that is easy."""
    name = use.tool["function"]["name"]
    family = next((f for f in FAMILIES if name in f.names), None)
    if family is None or rng.random() < 0.4:
        return draw_use(rng)
    other = _use(family, rng)
    keys = dict(zip(other.arguments, use.arguments, strict=False))
    if set(other.arguments) != set(use.arguments) and len(keys) != len(use.arguments):
        return draw_use(rng)
    if len(other.arguments) != len(use.arguments) or "{fn}" in family.asks[0]:
        return draw_use(rng)
    return other._replace(
        tool=use.tool, arguments={keys[key]: value for key, value in other.arguments.items()}
    )


def call_of(use: Use) -> dict[str, Any]:
    """Return a call as a message has it, the arguments as an object."""
    return {
        "type": "function",
        "function": {"name": use.tool["function"]["name"], "arguments": use.arguments},
    }


def chats(count: int, seed: int) -> Iterator[Chat]:
    """Yield conversations with functions."""
    rng = random.Random(seed)
    for _ in range(count):
        yield draw_chat(rng)
