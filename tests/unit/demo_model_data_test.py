"""The rows that the demo model learns from, and the cleaning of their text."""

import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

from mico.demo_model.data import Exchange, clean, is_english, is_looping, read_exchanges

SENTENCE = "The quick brown fox jumps over one lazy dog today. "


def row(**changes: Any) -> dict[str, Any]:
    return {
        "source": "gsm8k",
        "prompt_id": "pffffffff0000000",
        "model": "human",
        "instruction": "Name a colour.",
        "input": "",
        "output": "Blue.",
    } | changes


def answered(**changes: Any) -> dict[str, Any]:
    return {
        "source": "mico",
        "prompt_id": "mffffffff0000000",
        "prompt": "Name a colour.",
        "answer": "Blue.",
        "finish_reason": "stop",
    } | changes


def test_prompt_is_instruction_blank_line_input() -> None:
    assert clean(row(input="It is dark.")) == Exchange(
        "gsm8k", "pffffffff0000000", "Name a colour.\n\nIt is dark.", "Blue."
    )


def test_a_row_of_the_answering_model_is_an_exchange() -> None:
    assert clean(answered()) == Exchange("mico", "mffffffff0000000", "Name a colour.", "Blue.")


def test_people_answered_what_is_theirs_and_the_open_model_the_rest() -> None:
    assert clean(row(model="gpt-4-1106-preview")) is None
    assert clean(answered(source="gsm8k")) is None
    assert clean(row(source="self_instruct_252", model="text-davinci-003")) is None


@pytest.mark.parametrize(
    "unwanted",
    [
        {"finish_reason": "length"},
        {"source": "mt_bench"},
        {"source": "gpteacher_roleplay"},
        {"answer": "I am SmolLM, trained by Hugging Face."},
        {"answer": "As an AI language model I can't."},
    ],
)
def test_cut_answers_benchmarks_closed_models_and_other_names_are_dropped(unwanted: dict[str, Any]) -> None:
    assert clean(answered(**unwanted)) is None


@pytest.mark.parametrize("empty", ["", None, "  ", "<noinput>", "No input"])
def test_an_input_that_says_nothing_is_left_out(empty: str | None) -> None:
    exchange = clean(row(input=empty))
    assert exchange is not None
    assert exchange.prompt == "Name a colour."


def test_typographic_signs_become_plain_ones() -> None:
    exchange = clean(row(output=" \u201cBlue\u201d \u2013 that\u2019s\u00a0it\u2026\r\n"))
    assert exchange is not None
    assert exchange.answer == '"Blue" - that\'s it...'


def test_gsm8k_result_becomes_a_sentence() -> None:
    exchange = clean(row(source="gsm8k", output="She sold 48/2 = 24.\n#### 24"))
    assert exchange is not None
    assert exchange.answer == "She sold 48/2 = 24.\nThe answer is 24."


@pytest.mark.parametrize(
    "unwanted",
    [
        {"source": "alpaca"},
        {"source": "dolly_3k"},
        {"instruction": "  "},
        {"output": ""},
        {"output": None},
        {"output": "x" * 901},
        {"instruction": "x" * 701},
        {"output": "Das ist schön, größer, süß, ähnlich, über: üüüüü."},
        {"output": "Write to jane.doe@example.com for more."},
        {"instruction": "Reply to bob@example.org"},
        {"output": SENTENCE * 3},
    ],
    ids=lambda change: next(iter(change)) + " " + str(next(iter(change.values())))[:20],
)
def test_unwanted_rows_are_dropped(unwanted: dict[str, Any]) -> None:
    assert clean(row(**unwanted)) is None


def test_looping_is_four_words_three_times_or_six_twice() -> None:
    assert not is_looping(SENTENCE)
    assert is_looping(SENTENCE * 2)
    assert is_looping("go up the hill, " * 3)
    assert not is_looping("go up the hill, " * 2)
    assert not is_looping("no no no no")


def test_english_allows_a_few_other_signs() -> None:
    assert is_english("The café is open until 5 and it serves tea.")
    assert not is_english("今日は天気がいいですね。 OK")


def test_the_prompt_alone_decides_what_is_held_out() -> None:
    shares = [Exchange("mico", f"p{i:08x}", "p", str(i)).held_out for i in range(1_000)]
    assert sum(shares) == 20
    assert Exchange("gsm8k", "p00000000", "p", "a").held_out
    assert Exchange("smollm2", "p00000000ffffffff", "p", "b").held_out


@pytest.mark.parametrize("suffix", ["", ".gz", ".xz", ".zst"])
def test_packed_or_plain_files_read_alike_and_repeats_once(tmp_path: Path, suffix: str) -> None:
    text = "\n".join(json.dumps(r) for r in [row(), row(), row(output="Grün? No: red."), row(output="")])
    packers: dict[str, Callable[[bytes], bytes]] = {
        ".gz": gzip.compress,
        ".xz": lzma.compress,
        ".zst": zstandard.compress,
    }
    pack = packers.get(suffix, bytes)
    path = tmp_path / f"rows.jsonl{suffix}"
    path.write_bytes(pack(text.encode()))
    assert [exchange.answer for exchange in read_exchanges([path, path])] == ["Blue."]
