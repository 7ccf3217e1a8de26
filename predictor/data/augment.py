"""More prompts than were collected, for a small model to learn from a large one: texts mixed and thinned.

Nobody answered these, so they teach only through a teacher's forecasts.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

DROPPED_SHARE = 0.12


class Asked(NamedTuple):
    """A prompt that a language model asked, and the source that it is like."""

    text: str
    source: str


class Made(NamedTuple):
    """A made prompt, the fold both its parents are of, and the source that it is like, if it is like one."""

    text: str
    fold: int
    source: str = ""


def make(texts: Sequence[str], folds: Sequence[int], count: int, seed: int) -> list[Made]:
    """Prompts from parents of one fold, so that a regression without that fold has seen neither."""
    chance = random.Random(seed)
    by_fold: dict[int, list[str]] = {}
    for text, fold in zip(texts, folds, strict=True):
        by_fold.setdefault(fold, []).append(text)
    choices = sorted(by_fold)
    made = []
    for _ in range(count):
        fold = chance.choice(choices)
        first, second = chance.choice(by_fold[fold]), chance.choice(by_fold[fold])
        made.append(Made(_mixed(first, second, chance), fold))
    return made


def _mixed(first: str, second: str, chance: random.Random) -> str:
    """One of: the request of one with the material of another, two requests, or one with words left out."""
    request, _, own = first.partition("\n\n")
    other_request, _, material = second.partition("\n\n")
    kind = chance.random()
    if kind < 0.35 and (material or own):
        return f"{request}\n\n{material or own}" if material else f"{other_request}\n\n{own}"
    if kind < 0.5:
        return _crossed(request, other_request, chance) + (f"\n\n{own}" if own else "")
    if kind < 0.6:
        return f"{first} {second}"
    return _thinned(first, chance)


def _crossed(first: str, second: str, chance: random.Random) -> str:
    """The beginning of one and the end of the other."""
    left, right = first.split(" "), second.split(" ")
    return " ".join(left[: chance.randint(1, len(left))] + right[chance.randint(0, len(right) - 1) :])


def _thinned(text: str, chance: random.Random) -> str:
    return " ".join(word for word in text.split(" ") if chance.random() >= DROPPED_SHARE) or text
