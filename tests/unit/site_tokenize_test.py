"""Prompts become ids of the vocabulary, or the reason why not."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
from jinja2 import TemplateError

from site_engine import messages as m
from site_engine.core.request import Lane, RemainingCurve, Sampling
from site_engine.engine_client import Prepared
from site_engine.errors import NotServed, Reason
from site_engine.text.tokenize import PromptTokenizer
from tests.support.site_fakes import VOCABULARY, FakeTokenizer


def assign(prompt: m.Prompt, **more: object) -> m.Assign:
    plain = m.Assign(
        "a", "q", "letters", prompt, Sampling(), 1, False, RemainingCurve(), Lane.CHAT, 0, None, ""
    )
    return replace(plain, **more)


def prepare(assigned: m.Assign, tokenizer: FakeTokenizer | None = None) -> Prepared:
    return PromptTokenizer(tokenizer or FakeTokenizer(), VOCABULARY, lambda call: None).prepare_now(assigned)


def chat(content: str) -> m.ChatPrompt:
    return m.ChatPrompt((m.ChatMessage("user", content),))


def test_text_ids_and_chats() -> None:
    assert prepare(assign(m.TextPrompt("ab"))) == Prepared((97, 98), "")
    assert prepare(assign(m.TokenPrompt((97,)), echo=True)) == Prepared((97,), "a")
    assert prepare(assign(m.TextPrompt("ab"), echo=True)).echo == "ab"
    assert "".join(map(chr, prepare(assign(chat("hi"))).token_ids)) == "user: hi\n"


def test_an_empty_text_begins_like_any_text() -> None:
    assert prepare(assign(m.TextPrompt(""))).token_ids == (FakeTokenizer.bos_token_id,)


def test_an_empty_text_without_a_beginning_is_refused() -> None:
    tokenizer = FakeTokenizer()
    tokenizer.bos_token_id = None
    with pytest.raises(NotServed, match="no tokens"):
        prepare(assign(m.TextPrompt("")), tokenizer)


@pytest.mark.parametrize(
    ("assigned", "param"),
    [
        (assign(m.TokenPrompt((1, VOCABULARY))), "prompt"),
        (assign(m.TextPrompt("a"), resumed=(VOCABULARY,)), "resume"),
        (assign(m.TextPrompt("a"), sampling=Sampling(stop_token_ids=(999,))), "stop_token_ids"),
        (assign(m.TextPrompt("a"), sampling=Sampling(logit_bias={999: 1.0})), "logit_bias"),
    ],
)
def test_ids_stay_within_the_vocabulary(assigned: m.Assign, param: str) -> None:
    with pytest.raises(NotServed, match="vocabulary") as refused:
        prepare(assigned)
    assert (refused.value.reason, refused.value.param) == (Reason.INVALID, param)


def test_a_model_without_a_template_cannot_chat() -> None:
    with pytest.raises(NotServed, match="no chat template") as refused:
        prepare(assign(chat("hi")), FakeTokenizer(chat_template=None))
    assert refused.value.reason is Reason.UNSUPPORTED


def test_what_a_template_refuses_is_told_in_its_words() -> None:
    class Strict(FakeTokenizer):
        def apply_chat_template(self, *_: object, **__: object) -> str:
            raise TemplateError("roles must alternate")

    with pytest.raises(NotServed, match="roles must alternate") as refused:
        prepare(assign(chat("hi")), Strict())
    assert (refused.value.reason, refused.value.param) == (Reason.INVALID, "messages")


def test_a_template_sees_only_the_fields_that_are_there() -> None:
    seen: list[dict[str, object]] = []

    class Watching(FakeTokenizer):
        def apply_chat_template(self, messages: list[dict[str, object]], **_: object) -> str:
            seen.extend(messages)
            return "x"

    call = m.ChatMessage("assistant", "", tool_calls_json='[{"id": "1"}]')
    answer = m.ChatMessage("tool", "42", tool_call_id="1")
    prepare(assign(m.ChatPrompt((call, answer))), Watching())
    assert seen == [
        {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]},
        {"role": "tool", "content": "42", "tool_call_id": "1"},
    ]


def test_answers_come_back_through_post_even_when_the_tokenizer_breaks() -> None:
    gate = threading.Event()

    class Broken(FakeTokenizer):
        def encode(self, *_: object, **__: object) -> list[int]:
            gate.wait(timeout=60)
            raise RuntimeError("out of order")

    calls: queue.Queue[Callable[[], None]] = queue.Queue()
    answers: list[Prepared | NotServed] = []
    prompts = PromptTokenizer(Broken(), VOCABULARY, calls.put)
    prompts.prepare(assign(m.TextPrompt("a")), answers.append)
    prompts.prepare(assign(m.TokenPrompt((5,))), answers.append)
    assert prompts.waiting == 2
    gate.set()
    for _ in range(2):
        calls.get(timeout=60)()
    prompts.close()
    assert isinstance(answers[0], NotServed)
    assert answers[0].reason is Reason.INTERNAL
    assert answers[1] == Prepared((5,), "")


class SlowGrammars:
    """Notes what is compiled, in order; nothing until the gate is open."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.compiled: list[str] = []

    def literal(self, text: str) -> str:
        return text

    def compile(self, source: str, param: str) -> None:
        self.gate.wait(timeout=60)
        self.compiled.append(source[source.index("schema") :][:8])


def test_a_tenants_schemas_keep_others_waiting_for_one_of_them_at_most() -> None:
    calls: queue.Queue[Callable[[], None]] = queue.Queue()
    answers: list[Prepared | NotServed] = []
    grammars = SlowGrammars()
    prompts = PromptTokenizer(FakeTokenizer(), VOCABULARY, calls.put, grammars)
    for tenant, name in (("a", "schema 1"), ("a", "schema 2"), ("a", "schema 3"), ("b", "schema 4")):
        schema = json.dumps({"title": name})
        prompts.prepare(assign(m.TextPrompt("x"), tenant=tenant, guided_json=schema), answers.append)
    assert (prompts.waiting, prompts.waiting_of("a"), prompts.waiting_of("b")) == (4, 3, 1)
    grammars.gate.set()
    for _ in range(4):
        calls.get(timeout=60)()
    prompts.close()
    assert len(answers) == 4 and not any(isinstance(each, NotServed) for each in answers)
    assert grammars.compiled.index("schema 4") < grammars.compiled.index("schema 3")
    assert [each for each in grammars.compiled if each != "schema 4"] == ["schema 1", "schema 2", "schema 3"]
