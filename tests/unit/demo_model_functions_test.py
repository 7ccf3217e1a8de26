"""The made-up training data: calls that fit the functions offered, questions whose answers are right."""

import json
import random
import re

import pytest
from jsonschema import validate

from mico.demo_model import facts
from mico.demo_model.functions import Chat, chats, draw_use
from mico.demo_model.prompts import own_prompts

CHATS = list(chats(400, seed=5))
CALLING = [chat for chat in CHATS if any("tool_calls" in message for message in chat.messages)]


def schemas(chat: Chat) -> dict[str, dict[str, object]]:
    return {tool["function"]["name"]: tool["function"]["parameters"] for tool in chat.tools}


def test_every_call_is_of_a_function_offered_and_fits_its_schema() -> None:
    assert CALLING
    for chat in CALLING:
        offered = schemas(chat)
        for message in chat.messages:
            for call in message.get("tool_calls", []):
                validate(call["function"]["arguments"], offered[call["function"]["name"]])


def test_an_argument_stands_in_the_request_or_in_the_schema() -> None:
    """Else the model would learn to make arguments up. Jokes are the exception: they are asked for."""
    for chat in CALLING:
        asked = next(each["content"] for each in chat.messages if each["role"] == "user")
        for call in next(each["tool_calls"] for each in chat.messages if "tool_calls" in each):
            for key, value in call["function"]["arguments"].items():
                values = (
                    value
                    if isinstance(value, list)
                    else value.values()
                    if isinstance(value, dict)
                    else [value]
                )
                if not isinstance(value, bool) and key not in {"setup", "punchline"}:
                    assert all(str(each) in asked for each in values), (asked, key, value)


def test_there_are_chats_without_calls_with_several_and_with_results() -> None:
    calls = [len(each["tool_calls"]) for chat in CALLING for each in chat.messages if "tool_calls" in each]
    assert {1, 2} <= set(calls)
    assert 0.1 < 1 - len(CALLING) / len(CHATS) < 0.3
    assert any(chat.messages[-1]["role"] == "assistant" and len(chat.messages) > 3 for chat in CALLING)


def test_the_same_seed_makes_the_same_chats() -> None:
    assert json.dumps(CHATS[:50]) == json.dumps(list(chats(50, seed=5)))
    assert own_prompts(50, 3) == own_prompts(50, 3)
    assert len(set(own_prompts(500, 3))) == 500


@pytest.mark.parametrize("seed", range(3))
def test_sums_are_right(seed: int) -> None:
    found = 0
    for _, answer in facts.exchanges(500, seed):
        if match := re.fullmatch(r"(\d+) ([-+*/]) (\d+) = (-?\d+)\.", answer):
            a, sign, b, result = match.groups()
            expected = {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}
            assert int(result) == expected.get(sign, int(a) / int(b) if int(b) else None)
            found += 1
    assert found > 20


def test_an_invented_function_is_asked_for_by_name() -> None:
    rng = random.Random(1)
    uses = [draw_use(rng, invented=1.0) for _ in range(50)]
    assert all(use.tool["function"]["name"] in use.request for use in uses)
