"""Thoughts are told apart from answers: by their marks, however cut, also when they go on elsewhere."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from site_engine import messages as m
from site_engine.core.remaining_curve import RemainingCurve
from site_engine.core.request import Finish, Lane, Output, Request, Sampling, Thinking
from site_engine.engine.output_processor import OutputProcessor
from site_engine.engine_client import Prepared
from site_engine.errors import NotServed, Reason
from site_engine.messages import ToolChoice, Tools
from site_engine.text.grammar import Grammars
from site_engine.text.thinking import ThinkingDecoder, marks_of, thinking_after
from site_engine.text.tokenize import PromptTokenizer
from site_engine.text.vocabulary import vocabulary_of
from tests.support.thinking_models import TEMPLATES, thinking_tokenizer

VOCABULARY = 300
HI = (m.ChatMessage("user", "hi"),)
NOW = {"type": "function", "function": {"name": "now"}}
PIECES = ["<think>", "</think>", "<", "think", ">", "/", " ", "\n", "a", "b", "<tool_call>"]
cut_texts = st.lists(st.sampled_from(PIECES), max_size=12)


@cache
def prompts(name: str) -> PromptTokenizer:
    tokenizer = thinking_tokenizer(name)
    grammars = Grammars(tokenizer, VOCABULARY, [tokenizer.eos_token_id])
    return PromptTokenizer(tokenizer, VOCABULARY, lambda call: None, grammars)


def assigned(prompt: m.Prompt, **more: Any) -> m.Assign:
    settings: dict[str, Any] = {"sampling": Sampling(), "choices": 1, "echo": False, **more}
    return m.Assign(
        attempt_id="a",
        query_id="q",
        model="m",
        prompt=prompt,
        remaining=RemainingCurve(),
        lane=Lane.CHAT,
        priority=0,
        deadline_s=None,
        tenant="",
        **settings,
    )


def prepare(name: str, effort: str = "", tools: Tools | None = None, **more: Any) -> Prepared:
    chat = m.ChatPrompt(HI, tools, reasoning_effort=effort)
    return prompts(name).prepare_now(assigned(chat, **more))


# ---- whether a model thinks


@pytest.mark.parametrize(
    ("name", "effort", "thinking"),
    [
        ("switch", "", Thinking("<think>", "</think>")),
        ("switch", "none", Thinking("<think>", "</think>", closed=True)),
        ("opened", "", Thinking("<think>", "</think>", opened=True)),
        ("special", "", Thinking("[THINK]", "[/THINK]")),
        ("none", "", None),
    ],
)
def test_a_template_and_a_prompt_say_how_a_model_thinks(
    name: str, effort: str, thinking: Thinking | None
) -> None:
    prepared = prepare(name, effort)
    assert prepared.thinking == thinking
    assert list(prepared.shown.values()) == (["[THINK]", "[/THINK]"] if name == "special" else [])
    assert ("reasoning" in prompts(name).features) is (thinking is not None)


def test_the_text_of_a_completion_is_not_split() -> None:
    assert prompts("opened").prepare_now(assigned(m.TextPrompt("a <think>"))).thinking is None


# ---- telling thoughts from text


class Pieces:
    """A decoder whose tokens are the given pieces of a text."""

    def __init__(self, pieces: list[str]) -> None:
        self._pieces = pieces

    def push(self, token_id: int) -> str:
        return self._pieces[token_id]


def split(pieces: list[str], *, opened: bool = False, skip: int = 0, call: str = "") -> tuple[str, str, int]:
    """The thought and the text of an answer in these pieces, and the tokens of the thought."""
    thinking = Thinking("<think>", "</think>", opened, call=call)
    decoder = ThinkingDecoder(Pieces(pieces), thinking, skip)
    text = thought = ""
    for number in range(len(pieces)):
        text += decoder.push(number)
        thought += decoder.take()
    text += decoder.end()
    return thought + decoder.take(), text, decoder.tokens


def expected(text: str, *, opened: bool) -> tuple[str, str]:
    rest = text.lstrip()
    if rest.startswith("<think>"):
        rest = rest.removeprefix("<think>")
    elif not opened:
        return "", text
    thought, _, said = rest.partition("</think>")
    return thought.strip(), said.lstrip()


@given(cut_texts, st.booleans(), st.data())
def test_a_thought_is_what_stands_between_the_marks_however_it_is_cut(
    pieces: list[str], opened: bool, data: st.DataObject
) -> None:
    text = "".join(pieces)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    recut = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    for parts in (pieces, recut, list(text), [text]):
        assert split(parts, opened=opened)[:2] == expected(text, opened=opened)


@given(cut_texts, st.booleans(), st.integers(0, 9))
def test_what_was_delivered_of_a_thought_is_not_said_again(
    pieces: list[str], opened: bool, skip: int
) -> None:
    thought, text, tokens = split(pieces, opened=opened)
    assert split(pieces, opened=opened, skip=skip) == (thought[skip:], text, tokens)


@pytest.mark.parametrize(
    ("pieces", "opened", "tokens"),
    [
        (["<think>", "a", "b", "</think>", "\n\n", "c", "d"], False, 4),
        (["<", "think", ">", "a", "</think>", "c"], False, 5),
        (["a", "b", "</think>", "\n\n", "c"], True, 3),
        (["c", "d"], False, 0),
        (["<", "thin"], False, 0),
        (["a", "b"], True, 2),
    ],
)
def test_the_tokens_of_a_thought_are_counted_with_its_marks(
    pieces: list[str], opened: bool, tokens: int
) -> None:
    assert split(pieces, opened=opened)[2] == tokens


@pytest.mark.parametrize(
    ("pieces", "opened", "told"),
    [
        (["\n", "<", "b>Hi"], False, [0, 0, 0]),  # gateways keep a count above 0
        (["\n", "<th", "ink>", "Hm", "</think>", "42"], False, [0, 0, 3, 4, 5, 5]),
        (["\n", "Hm"], True, [1, 2]),
    ],
)
def test_no_token_counts_for_a_thought_that_may_not_come(
    pieces: list[str], opened: bool, told: list[int]
) -> None:
    decoder = ThinkingDecoder(Pieces(pieces), Thinking("<think>", "</think>", opened))
    found = []
    for number in range(len(pieces)):
        decoder.push(number)
        found.append(decoder.tokens)
    assert found == told


@pytest.mark.parametrize(
    ("pieces", "opened", "thought", "text", "tokens"),
    [
        (["a", "\n", "<tool_call>", "{}"], True, "a", "<tool_call>{}", 2),
        (["<think>", "a", "<tool_call>", "{}", "</think>"], False, "a", "<tool_call>{}</think>", 2),
        (["<tool_call>", "{}"], True, "", "<tool_call>{}", 0),
        (["a", "<tool", "_box>", "</think>", "b"], True, "a<tool_box>", "b", 4),
        (["a", "<tool"], True, "a<tool", "", 2),
        (["a", "</think>", "<tool_call>", "{}"], True, "a", "<tool_call>{}", 2),
    ],
)
def test_a_call_ends_a_thought_that_is_open(
    pieces: list[str], opened: bool, thought: str, text: str, tokens: int
) -> None:
    assert split(pieces, opened=opened, call="<tool_call>") == (thought, text, tokens)
    whole = "".join(pieces)
    for at in range(len(whole) + 1):
        cut = [whole[:at], whole[at:]]
        assert split(cut, opened=opened, call="<tool_call>")[:2] == (thought, text)


def test_only_where_a_call_may_come_its_mark_ends_a_thought() -> None:
    pieces = ["a", "<tool_call>", "b", "</think>", "c"]
    assert split(pieces, opened=True) == ("a<tool_call>b", "c", 4)


# ---- in the engine


def answer(
    name: str, said: str, *, resumed: int = 0, delivered: tuple[int, int] = (0, 0), **rules: Any
) -> list[Output]:
    """The outputs of an engine whose model says this, of which `resumed` tokens came from another site."""
    tokenizer = thinking_tokenizer(name)
    prepared = prepare(name)
    ids = [*tokenizer.encode(said, add_special_tokens=False), tokenizer.eos_token_id]
    request = Request(
        "a",
        prepared.token_ids,
        Sampling(**rules),
        thinking=prepared.thinking,
        shown=prepared.shown,
        resumed=ids[:resumed],
        resumed_reasoning_chars=delivered[0],
        resumed_chars=delivered[1],
    )
    request.max_tokens = rules.get("max_tokens") or 999
    processor = OutputProcessor(request, vocabulary_of(tokenizer), [tokenizer.eos_token_id])
    if (finish := processor.replay()) is not None:
        return [processor.end(finish, 0.0)]
    outputs: list[Output] = []
    for token_id in ids[resumed:]:
        outputs.append(processor.take(token_id, 0.0, None))
        if outputs[-1].finish is not None:
            break
    return outputs


def joined(outputs: list[Output]) -> tuple[str, str]:
    return "".join(each.reasoning for each in outputs), "".join(each.text for each in outputs)


SAID = {
    "switch": "<think>\nSix  sevens.\n</think>\n\nIt is 42.",
    "opened": "Six  sevens.\n</think>\n\nIt is 42.",
    "special": "[THINK]Six  sevens.[/THINK]It is 42.",
}


@pytest.mark.parametrize("name", SAID)
def test_an_engine_tells_thoughts_apart_and_counts_them(name: str) -> None:
    outputs = answer(name, SAID[name])
    assert joined(outputs) == ("Six  sevens.", "It is 42.")
    thought = SAID[name][: SAID[name].index("It")].rstrip()
    counted = len(thinking_tokenizer(name).encode(thought, add_special_tokens=False))
    assert outputs[-1].reasoning_tokens == counted
    assert outputs[-1].completion_tokens == sum(len(each.token_ids) for each in outputs)


@pytest.mark.parametrize("name", SAID)
def test_an_answer_goes_on_at_every_token_of_its_thought_and_of_its_text(name: str) -> None:
    whole = answer(name, SAID[name])
    for cut in range(len(whole)):
        thought, text = joined(whole[:cut])
        rest = answer(name, SAID[name], resumed=cut, delivered=(len(thought), len(text)))
        more, said = joined(rest)
        assert (thought + more, text + said) == joined(whole)
        assert rest[-1].reasoning_tokens == whole[-1].reasoning_tokens
        assert rest[-1].completion_tokens == whole[-1].completion_tokens


@pytest.mark.parametrize("name", SAID)
def test_an_answer_cut_in_its_thought_has_no_text(name: str) -> None:
    outputs = answer(name, SAID[name], max_tokens=8)
    thought, text = joined(outputs)
    assert ("Six  sevens.".startswith(thought), bool(thought), text) == (True, True, "")
    assert (outputs[-1].finish, outputs[-1].reasoning_tokens) == (Finish.LENGTH, 8)


@pytest.mark.parametrize("name", SAID)
def test_a_stop_string_ends_the_text_not_the_thought(name: str) -> None:
    outputs = answer(name, SAID[name], stop=("Six", " 4"))
    assert joined(outputs) == ("Six  sevens.", "It is")
    assert (outputs[-1].finish, outputs[-1].stop_sequence) == (Finish.STOP, " 4")


def test_the_stop_string_that_ended_an_answer_is_named() -> None:
    assert answer("none", "abcd", stop=("c", "bc"))[-1].stop_sequence == "bc"
    ended = answer("none", "abcd", stop=("x",))[-1]
    assert (ended.finish, ended.stop_sequence) == (Finish.STOP, "")
    assert answer("switch", " <th", stop=("<",))[-1].text == " "
    cut = len(thinking_tokenizer("switch").encode(" <th", add_special_tokens=False))
    at_limit = answer("switch", " <think", stop=("<",), max_tokens=cut)[-1]
    assert (at_limit.finish, at_limit.stop_sequence) == (Finish.STOP, "<")


# ---- going on elsewhere


def test_a_thought_that_another_site_delivered_as_text_is_not_said_again() -> None:
    """As sites did before they told thoughts from text."""
    tokenizer, prepared = thinking_tokenizer("switch"), prepare("switch")
    for said, delivered, contradicts in (
        ("<think>\nSix", 11, True),
        ("<think>Six</think>It", 2, False),
        ("It is", 5, False),
    ):
        request = Request(
            "a",
            prepared.token_ids,
            thinking=prepared.thinking,
            resumed=tokenizer.encode(said, add_special_tokens=False),
            resumed_chars=delivered,
        )
        request.max_tokens = 999
        processor = OutputProcessor(request, vocabulary_of(tokenizer), [tokenizer.eos_token_id])
        processor.replay()
        assert processor.contradicts_delivered is contradicts


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"resumed": (1,)}, "how much of the model's thought"),
        ({"resumed_text": "It", "resumed_chars": 2, "resumed_tokens": 1}, "read as the model's thought"),
    ],
)
def test_an_answer_whose_thought_is_not_known_does_not_go_on(more: dict[str, Any], why: str) -> None:
    with pytest.raises(NotServed, match=why) as refused:
        prepare("opened", **more)
    assert refused.value.reason is Reason.UNSUPPORTED
    assert prepare("opened", resumed=(1,), resumed_reasoning_chars=0).resumed == (1,)


# ---- grammars


FORCED = Tools((NOW,), ToolChoice.REQUIRED)
STRICT = Tools(({"type": "function", "function": {"name": "now", "strict": True}},))
CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
SCHEMA = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'
ALLOWED = [
    ("switch", "", None, '<think>\n{"b": no JSON\n</think>\n\n{"a": 1}'),
    ("switch", "", None, '{"a": 1}'),
    ("switch", "none", None, '{"a": 1}'),
    ("opened", "", None, 'hm {"b"\n</think>\n\n{"a": 1}'),
    ("special", "", None, '[THINK]hm[/THINK]{"a": 1}'),
    ("switch", "", FORCED, f"<think>hm</think>\n{CALL}"),
    ("opened", "", FORCED, f"hm</think>\n\n{CALL}"),
    ("opened", "", STRICT, f"hm</think>\n\nI call {CALL}"),
]
REFUSED = [
    ("switch", "", None, "It is 1."),
    ("switch", "", None, "<think>hm</think>It is 1."),
    ("switch", "none", None, "<think>"),
    ("opened", "", None, "hm</think>\n\nIt"),
    ("opened", "", FORCED, "hm</think>\n\nIt is"),
    ("opened", "", FORCED, f"hm {CALL}</think>\n\n{CALL}"),  # no call within the thought
]


def is_allowed(name: str, effort: str, tools: Tools | None, said: str) -> bool:
    prepared = prepare(name, effort, tools, guided_json="" if tools else SCHEMA)
    assert prepared.grammar is not None
    guide = prepared.grammar.start()
    ids = thinking_tokenizer(name).encode(said, add_special_tokens=False)
    return all(guide.take(token_id) for token_id in ids) and bool(guide.matcher.is_accepting())


@pytest.mark.parametrize(("name", "effort", "tools", "said"), ALLOWED)
def test_a_grammar_begins_after_the_thought(name: str, effort: str, tools: Tools | None, said: str) -> None:
    assert is_allowed(name, effort, tools, said)


@pytest.mark.parametrize(("name", "effort", "tools", "said"), REFUSED)
def test_a_grammar_holds_after_the_thought(name: str, effort: str, tools: Tools | None, said: str) -> None:
    assert not is_allowed(name, effort, tools, said)


@pytest.mark.parametrize(
    ("tools", "call"), [(None, ""), (Tools((NOW,)), "<tool_call>"), (FORCED, ""), (STRICT, "")]
)
def test_a_call_ends_a_thought_where_functions_are_offered_and_no_grammar_parts_them(
    tools: Tools | None, call: str
) -> None:
    thinking = prepare("opened", tools=tools).thinking
    assert thinking == Thinking("<think>", "</think>", opened=True, call=call)


def test_marks_are_those_that_a_template_shows() -> None:
    assert marks_of(TEMPLATES["opened"]) == ("<think>", "</think>")
    assert marks_of(TEMPLATES["none"]) is None
    assert thinking_after("a<think>\n", ("<think>", "</think>")).opened
