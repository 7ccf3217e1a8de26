"""Mix synthetic prompts from collected ones, for a small model to learn from a large one.

Nobody answered these, so they teach only through a teacher's forecasts.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

WORD_DROPOUT = 0.12


class GeneratedPrompt(NamedTuple):
    """A prompt from a language model, and the source that it imitates."""

    text: str
    source: str


class SyntheticPrompt(NamedTuple):
    """A synthetic prompt, the fold of both its parents, and the source that it imitates, if any."""

    text: str
    fold: int
    source: str = ""


def mix_prompts(texts: Sequence[str], folds: Sequence[int], count: int, seed: int) -> list[SyntheticPrompt]:
    """Mix prompts from parents of one fold, so that a regression without that fold has seen neither."""
    rng = random.Random(seed)
    by_fold: dict[int, list[str]] = {}
    for text, fold in zip(texts, folds, strict=True):
        by_fold.setdefault(fold, []).append(text)
    choices = sorted(by_fold)
    mixed = []
    for _ in range(count):
        fold = rng.choice(choices)
        first, second = rng.choice(by_fold[fold]), rng.choice(by_fold[fold])
        mixed.append(SyntheticPrompt(_mix(first, second, rng), fold))
    return mixed


def _mix(first: str, second: str, rng: random.Random) -> str:
    """Return one prompt's request with the other's material, both requests, or one without some words."""
    request, _, own = first.partition("\n\n")
    other_request, _, material = second.partition("\n\n")
    kind = rng.random()
    if kind < 0.35 and (material or own):
        return f"{request}\n\n{material or own}" if material else f"{other_request}\n\n{own}"
    if kind < 0.5:
        return _splice(request, other_request, rng) + (f"\n\n{own}" if own else "")
    if kind < 0.6:
        return f"{first} {second}"
    return " ".join(word for word in first.split(" ") if rng.random() >= WORD_DROPOUT) or first


def _splice(first: str, second: str, rng: random.Random) -> str:
    """Return the beginning of one and the end of the other."""
    left, right = first.split(" "), second.split(" ")
    return " ".join(left[: rng.randint(1, len(left))] + right[rng.randint(0, len(right) - 1) :])
