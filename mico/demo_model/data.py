"""Training data of the demo model: rows of the data file, cleaned to short, finished English answers."""

import gzip
import io
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

# Sources whose licence is known; those that state none are left out, since the weights are passed on.
LICENCES = {
    "alpaca": "CC BY-NC 4.0",
    "alpaca_en_demo": "CC BY-NC 4.0",
    "alpaca_eval": "CC BY-NC 4.0",
    "code_alpaca_2k": "CC BY-NC 4.0",
    "dolly_3k": "CC BY-SA 3.0",
    "gpteacher_codegen": "MIT",
    "gpteacher_roleplay": "MIT",
    "gsm8k": "MIT (people) and Apache-2.0 (models)",
    "self_instruct_seed": "Apache-2.0",
}

MAX_PROMPT_CHARS = 1_600
MAX_ANSWER_CHARS = 2_000
LONG_ANSWER_CHARS = 1_000  # from here on an answer without an ending was probably cut by its source's limit
MIN_ASCII_SHARE = 0.97
HELD_OUT_PERCENT = 2

_TYPOGRAPHY = str.maketrans(
    {"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2013": "-", "\u2014": "-",
     "\u2026": "...", "\u00a0": " ", "\u200b": "", "\ufeff": "", "\r": ""}
)  # fmt: skip
_EMAIL = re.compile(r"[\w.+-]+@[\w-]+\.\w")
_GSM8K_RESULT = re.compile(r"\n#### (.+)$")
_NO_INPUT = re.compile(r"<?no ?input>?", re.IGNORECASE)
_ENDINGS = tuple(".!?\"')]}>`:;*|")


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


def read_exchanges(path: Path) -> list[Exchange]:
    """Return the usable rows of the data file in its order, each (prompt, answer) once."""
    cleaned = (clean(row) for row in read_rows(path))
    return list(dict.fromkeys(exchange for exchange in cleaned if exchange is not None))


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a JSON-lines file, plain or compressed (.gz, .zst)."""
    with _open_text(path) as lines:
        for line in lines:
            yield json.loads(line)


def _open_text(path: Path) -> io.TextIOBase:
    if path.suffix == ".zst":
        import zstandard

        return io.TextIOWrapper(zstandard.ZstdDecompressor().stream_reader(path.open("rb")), encoding="utf-8")
    if path.suffix == ".gz":
        return io.TextIOWrapper(gzip.open(path), encoding="utf-8")
    return path.open(encoding="utf-8")


def clean(row: dict[str, Any]) -> Exchange | None:
    """Return the row as an exchange, or None if it would teach the model something unwanted."""
    source = row["source"]
    if source not in LICENCES:
        return None
    prompt = _prompt(row["instruction"], row.get("input") or "")
    answer = _GSM8K_RESULT.sub(r"\nThe answer is \1.", _plain(row["output"] or ""))
    fits = 0 < len(prompt) <= MAX_PROMPT_CHARS and 0 < len(answer) <= MAX_ANSWER_CHARS
    if not fits or not is_english(prompt + answer) or _EMAIL.search(prompt + answer):
        return None
    if is_cut(answer) or is_looping(answer):
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


def is_cut(answer: str) -> bool:
    """Return whether a long answer stops in the middle of a sentence."""
    return len(answer) >= LONG_ANSWER_CHARS and not answer.endswith(_ENDINGS)


def is_looping(answer: str) -> bool:
    """Return whether an answer repeats eight words three times, which a model must not learn."""
    words = answer.split()
    spans = Counter(tuple(words[i : i + 8]) for i in range(len(words) - 7))
    return max(spans.values(), default=0) >= 3
