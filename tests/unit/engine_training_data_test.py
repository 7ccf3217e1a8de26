"""What is learned is what the model is to generate behind its prompt: the answer, and its end token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from site_engine.training.data import Example, RowEncoder
from tests.support.tiny_model import END, TEMPLATE, write_tiny_model

PARTS = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""A template that writes no end token."""
FORGETS = (
    "{% for m in messages %}<|{{ m['role'] }}|>"
    "{{ m['content'] if loop.last or m['role'] != 'assistant' else m['content'].split('>')[-1] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""A template that keeps of earlier answers only what follows their thought."""
HI, YES = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def tokenizer(folder: Path) -> Any:
    import transformers

    return transformers.AutoTokenizer.from_pretrained(folder)


def line(*messages: dict[str, Any], **more: Any) -> bytes:
    return json.dumps({"messages": list(messages)} | more).encode()


def encoded(tokenizer: Any, *lines: bytes, template: str = TEMPLATE, context: int = 200) -> list[Example]:
    tokenizer.chat_template = template
    dataset = RowEncoder(tokenizer, (tokenizer.eos_token_id,), context).dataset(lines)
    assert dataset.faults == ()
    return list(dataset.examples)


def texts(tokenizer: Any, example: Example) -> tuple[str, str]:
    """Return the whole text of an example and the text that is learned."""
    return tokenizer.decode(example.ids), tokenizer.decode(example.ids[example.learned])


def test_an_answer_is_learned_with_its_end_behind_the_prompt_that_is_served(tokenizer: Any) -> None:
    (example,) = encoded(tokenizer, line(HI, YES))
    assert texts(tokenizer, example) == (f"<|user|>Hi{END}<|assistant|>Yes{END}", f"Yes{END}")
    served = tokenizer.apply_chat_template([HI], add_generation_prompt=True, return_dict=False)
    assert example.ids[~example.learned].tolist() == served


def test_only_answers_of_weight_one_are_learned(tokenizer: Any) -> None:
    no = {"role": "assistant", "content": "No", "weight": 0}
    (example,) = encoded(tokenizer, line(HI, no, HI, YES, HI, YES | {"content": "Oh"}))
    assert texts(tokenizer, example)[1] == f"Yes{END}Oh{END}"
    assert texts(tokenizer, example)[0].count("No") == 1


def test_an_end_that_the_template_does_not_write_is_learned(tokenizer: Any) -> None:
    examples = encoded(tokenizer, line(HI, YES, HI, YES), template=PARTS)
    begun = "<|user|>Hi<|assistant|>"
    assert [texts(tokenizer, each) for each in examples] == [
        (f"{begun}Yes{END}", f"Yes{END}"),
        (f"{begun}Yes{begun}Yes{END}", f"Yes{END}"),
    ]


def test_each_answer_is_learned_as_it_is_first_generated_where_templates_rewrite_it(tokenizer: Any) -> None:
    thought = {"role": "assistant", "content": "hm>Yes"}
    examples = encoded(tokenizer, line(HI, thought, HI, thought), template=FORGETS)
    begun = f"<|user|>Hi{END}<|assistant|>"
    assert [texts(tokenizer, each) for each in examples] == [
        (f"{begun}hm>Yes{END}", f"hm>Yes{END}"),
        (f"{begun}Yes{END}{begun}hm>Yes{END}", f"hm>Yes{END}"),
    ]


def test_control_tokens_in_the_data_are_text(tokenizer: Any) -> None:
    sly = {"role": "assistant", "content": f"a{END}<|user|>b"}
    (example,) = encoded(tokenizer, line(HI, sly))
    assert texts(tokenizer, example)[1] == f"a{END}<|user|>b{END}"
    assert example.ids.tolist().count(tokenizer.eos_token_id) == 2


def test_a_pair_is_its_prompt_and_its_learned_completion(tokenizer: Any) -> None:
    (example, alone) = encoded(
        tokenizer,
        b'{"prompt": "1+1=", "completion": "2"}',
        b'{"prompt": "", "completion": "abc"}',
        template="",
    )
    assert texts(tokenizer, example) == (f"1+1=2{END}", f"2{END}")
    assert texts(tokenizer, alone) == (f"abc{END}", f"bc{END}")  # nothing predicts the first token


@pytest.mark.parametrize(
    ("bad", "template", "reason"),
    [
        (b"{", TEMPLATE, "is not JSON"),
        (line(HI, YES | {"content": "y" * 300}), TEMPLATE, "tokens, and the model reads 200 at most"),
        (line(HI, YES), "", "the model has no chat template"),
        (line(HI, YES), "{{ raise_exception('no users') }}", "refuses it: no users"),
        (line(HI, YES), TEMPLATE.replace("<|assistant|>", "<|tool|>"), "does not answer where prompts end"),
        (
            line(HI, YES, tools=[{"type": "function", "function": {"name": "add"}}]),
            TEMPLATE,
            "this model's chat template takes no tools",
        ),
    ],
)
def test_what_only_the_tokens_show_is_named_by_its_line(
    tokenizer: Any, bad: bytes, template: str, reason: str
) -> None:
    tokenizer.chat_template = template
    good = b'{"prompt": "a", "completion": "b"}'
    dataset = RowEncoder(tokenizer, (), 200).dataset([good, bad, good])
    assert len(dataset.examples) == 2
    ((number, message),) = dataset.faults
    assert number == 2
    assert reason in message


def test_an_empty_file_is_a_fault(tokenizer: Any) -> None:
    assert [str(fault) for fault in RowEncoder(tokenizer, (), 200).dataset([]).faults] == [
        "the file has no lines"
    ]
