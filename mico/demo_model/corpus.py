"""Conversations as packed windows of tokens, kept in a folder between runs."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from mico.demo_model.data import Exchange, read_exchanges
from mico.demo_model.greetings import GREETINGS
from mico.demo_model.tokens import ASSISTANT, CONTEXT_TOKENS, END, SYSTEM, USER, train_tokenizer

SYSTEM_PROMPTS = ["You are a helpful assistant.", "You are a friendly assistant. Answer the user's question."]
SHARE_WITH_SYSTEM = 0.1
SHARE_JOINED = 0.15  # of conversations go on after the first answer, with another exchange of the data
UNSCORED, PROMPT, ANSWER = 0, 1, 2
_OPEN_WINDOWS = 32


class Document(NamedTuple):
    """One conversation: its tokens, and for each UNSCORED, PROMPT or ANSWER."""

    tokens: list[int]
    scores: list[int]


class Windows(NamedTuple):
    """Packed conversations, all [windows, context]; `documents` numbers them, 0 is padding."""

    tokens: NDArray[np.uint16]
    documents: NDArray[np.uint8]
    scores: NDArray[np.uint8]


class Corpus(NamedTuple):
    """Tokenizer and windows for training."""

    tokenizer: PreTrainedTokenizerFast
    train: Windows
    held_out: Windows


def make_corpus(
    data: Path, folder: Path, *, vocabulary: int, seed: int, context: int = CONTEXT_TOKENS
) -> None:
    """Train the tokenizer and pack the data file into `folder`."""
    exchanges = read_exchanges(data)
    kept = [exchange for exchange in exchanges if not exchange.held_out] + GREETINGS
    held_out = [exchange for exchange in exchanges if exchange.held_out]
    tokenizer = train_tokenizer(kept, vocabulary)
    tokenizer.save_pretrained(folder)
    rng = random.Random(seed)
    rng.shuffle(kept)
    documents = [encode(tokenizer, turns, system) for turns, system in conversations(kept, rng)]
    _save(folder / "train.npz", pack(documents, context))
    held_out_documents = [encode(tokenizer, [exchange], None) for exchange in held_out]
    _save(folder / "held_out.npz", pack(held_out_documents, context))
    lines = [json.dumps(exchange._asdict()) for exchange in held_out]
    (folder / "held_out.jsonl").write_text("\n".join(lines), encoding="utf-8")


def load_corpus(folder: Path) -> Corpus:
    """Load the corpus that make_corpus wrote to `folder`."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    return Corpus(tokenizer, _load(folder / "train.npz"), _load(folder / "held_out.npz"))


def conversations(
    exchanges: list[Exchange], rng: random.Random
) -> Iterator[tuple[list[Exchange], str | None]]:
    """Yield the exchanges as conversations of one to three turns, some with a system prompt."""
    rest = iter(exchanges)
    for first in rest:
        turns = [first]
        while len(turns) < 3 and rng.random() < SHARE_JOINED and (following := next(rest, None)) is not None:
            turns.append(following)
        yield turns, rng.choice(SYSTEM_PROMPTS) if rng.random() < SHARE_WITH_SYSTEM else None


def encode(tokenizer: PreTrainedTokenizerFast, turns: list[Exchange], system: str | None) -> Document:
    """Encode a conversation as the chat template does."""
    tokens: list[int] = []
    scores: list[int] = []

    def add_turn(role: str, text: str, score: int) -> None:
        words = tokenizer.encode(text, add_special_tokens=False)
        tokens.extend([tokenizer.convert_tokens_to_ids(role), *words, tokenizer.convert_tokens_to_ids(END)])
        scores.extend([UNSCORED, *[score] * len(words), ANSWER if score == ANSWER else UNSCORED])

    if system is not None:
        add_turn(SYSTEM, system, UNSCORED)
    for turn in turns:
        add_turn(USER, turn.prompt, PROMPT)
        add_turn(ASSISTANT, turn.answer, ANSWER)
    return Document(tokens, scores)


def pack(documents: list[Document], context: int) -> Windows:
    """Pack documents into windows, each in the first open one with room; of too many the fullest closes.

    Documents longer than a window lose their end; all others stay whole.
    """
    full: list[list[Document]] = []
    open_windows: list[tuple[int, list[Document]]] = []  # tokens left, content
    for document in documents:
        size = min(len(document.tokens), context)
        fitting = (i for i, (left, _) in enumerate(open_windows) if left >= size)
        i = next(fitting, None)
        if i is None:
            open_windows.append((context - size, [document]))
        else:
            left, content = open_windows[i]
            open_windows[i] = (left - size, [*content, document])
        if len(open_windows) > _OPEN_WINDOWS:
            fullest = min(range(len(open_windows)), key=lambda j: open_windows[j][0])
            full.append(open_windows.pop(fullest)[1])
    return _windows(full + [content for _, content in open_windows], context)


def _windows(contents: list[list[Document]], context: int) -> Windows:
    shape = (len(contents), context)
    windows = Windows(np.zeros(shape, np.uint16), np.zeros(shape, np.uint8), np.zeros(shape, np.uint8))
    for row, content in enumerate(contents):
        start = 0
        for number, document in enumerate(content, start=1):
            end = min(start + len(document.tokens), context)
            windows.tokens[row, start:end] = document.tokens[: end - start]
            windows.documents[row, start:end] = number
            windows.scores[row, start:end] = document.scores[: end - start]
            start = end
    return windows


def _save(path: Path, windows: Windows) -> None:
    np.savez_compressed(path, **windows._asdict())


def _load(path: Path) -> Windows:
    with np.load(path) as arrays:
        return Windows(**arrays)
