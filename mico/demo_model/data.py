"""Training data of the demo model: rows of the data file, cleaned to short, finished English answers."""

import gzip
import io
import json
import lzma
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

LICENCES = {
    "mico": "Apache-2.0 (ours)",
    "smollm2": "Apache-2.0 (prompts that SmolLM2-135M-Instruct thought of)",
    "gsm8k": "MIT",
    "self_instruct_252": "Apache-2.0",
    "self_instruct_seed": "Apache-2.0",
}
"""Sources that the demo model learns from, as their projects state the licence of the prompts. People wrote
those of the three public ones; benchmarks and what a closed model wrote are left out.
"""
WRITTEN_BY_PEOPLE = frozenset({"gsm8k"})
"""Sources whose answers are people's; SmolLM2-135M-Instruct answered the others."""
PROMPT_LICENCES = {
    "gsm8k": "MIT",
    "self_instruct_252": "Apache-2.0",
    "self_instruct_seed": "Apache-2.0",
    "tulu_eval": "Apache-2.0",
    "arena_bench_v1": "Apache-2.0",
    "arena_hard_v0.1": "Apache-2.0",
    "arena_hard_v2.0": "Apache-2.0",
    "mt_bench": "Apache-2.0",
    "gpteacher_codegen": "MIT",
    "gpteacher_roleplay": "MIT",
}
"""Sources whose prompts are answered for the lengths of the answers."""

MAX_PROMPT_CHARS = 700
MAX_ANSWER_CHARS = 900
MIN_ASCII_SHARE = 0.97
HELD_OUT_PERCENT = 2

_TYPOGRAPHY = str.maketrans(
    {"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2013": "-", "\u2014": "-",
     "\u2026": "...", "\u00a0": " ", "\u200b": "", "\ufeff": "", "\r": ""}
)  # fmt: skip
_EMAIL = re.compile(r"[\w.+-]+@[\w-]+\.\w")
_GSM8K_RESULT = re.compile(r"\n#### (.+)$")
_NO_INPUT = re.compile(r"<?no ?input>?", re.IGNORECASE)
_SELF = re.compile(r"SmolLM|Hugging|language model|\bAI (?:assistant|model)|virtual assistant", re.IGNORECASE)


class Exchange(NamedTuple):
    """One prompt and one good answer to it."""

    source: str
    prompt_id: str
    prompt: str
    answer: str

    @property
    def held_out(self) -> bool:
        """True if it is held out; depends on the prompt, so that none is both trained on and measured."""
        return int(self.prompt_id[1:9], 16) % 100 < HELD_OUT_PERCENT


def read_exchanges(paths: Iterable[Path]) -> list[Exchange]:
    """Return the usable rows of the files in their order, each (prompt, answer) once."""
    cleaned = (clean(row) for path in paths for row in read_rows(path))
    return list(dict.fromkeys(exchange for exchange in cleaned if exchange is not None))


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a JSON-lines file, plain or compressed (.gz, .xz, .zst)."""
    with _open_text(path) as lines:
        for line in lines:
            yield json.loads(line)


def _open_text(path: Path) -> io.TextIOBase:
    if path.suffix == ".zst":
        import zstandard

        return io.TextIOWrapper(zstandard.ZstdDecompressor().stream_reader(path.open("rb")), encoding="utf-8")
    if path.suffix == ".xz":
        return io.TextIOWrapper(lzma.open(path), encoding="utf-8")
    if path.suffix == ".gz":
        return io.TextIOWrapper(gzip.open(path), encoding="utf-8")
    return path.open(encoding="utf-8")


def clean(row: dict[str, Any]) -> Exchange | None:
    """Return the row as an exchange, or None if it would teach the model something unwanted.

    Rows are those of `mico.demo_model.answers`, or have an instruction, an input, an output and its `model`.
    """
    source, by_people = row["source"], row.get("model") == "human"
    if source not in LICENCES or by_people != (source in WRITTEN_BY_PEOPLE) or ("model" in row) != by_people:
        return None
    prompt = _prompt(row.get("instruction") or row.get("prompt") or "", row.get("input") or "")
    answer = _GSM8K_RESULT.sub(r"\nThe answer is \1.", _plain(row.get("output") or row.get("answer") or ""))
    fits = 0 < len(prompt) <= MAX_PROMPT_CHARS and 0 < len(answer) <= MAX_ANSWER_CHARS
    if not fits or row.get("finish_reason", "stop") != "stop" or not is_english(prompt + answer):
        return None
    if _EMAIL.search(prompt + answer) or _SELF.search(prompt + answer) or is_looping(answer):
        return None
    return Exchange(source, row["prompt_id"], prompt, answer)


def _prompt(instruction: str, given: str) -> str:
    given = _plain(given)
    parts = [_plain(instruction), "" if _NO_INPUT.fullmatch(given) else given]
    return "\n\n".join(part for part in parts if part)


def _plain(text: str) -> str:
    return text.translate(_TYPOGRAPHY).strip()


def is_english(text: str) -> bool:
    """Return whether a text is nearly all ASCII, enough for sources that are English or clearly not."""
    return sum(character.isascii() for character in text) >= MIN_ASCII_SHARE * len(text)


def is_looping(answer: str) -> bool:
    """Return whether an answer says four words three times, or six twice, which a model must not learn."""
    words = answer.split()
    return any(
        max(Counter(tuple(words[i : i + span]) for i in range(len(words) - span + 1)).values(), default=0)
        >= times
        for span, times in ((4, 3), (6, 2))
    )
