"""A language model that learns to ask as a corpus does, and asks.

Nobody answered its prompts, so they teach only through teachers' forecasts.
Needs torch and transformers; training only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from predictor.data.augment import GeneratedPrompt
from predictor.training.distillation.lm_teacher import Reader, Tokens
from predictor.training.train_loop import Descent, Draw, Recipe

Progress = Callable[[str], None]
MOST_TRIES = 4
"""Times as many prompts as are wanted; a small corpus does not teach so many different ones."""


RECIPE = Recipe(epochs=3, batch_prompts=256, body_rate=2e-4, head_rate=2e-4, warm_share=0.05, seed=100)


@dataclass(frozen=True, slots=True)
class Asking:
    """How a language model learns to ask, and how it asks then."""

    recipe: Recipe = RECIPE
    longest_tokens: int = 140
    top_p: float = 0.97
    top_k: int = 300
    cut_share: float = 0.5
    """Of the prompts that did not end, which are kept as far as they go."""
    evened: float = 0.7
    """A source is asked for as often as this power of its prompts: rare ones oftener than they are."""
    at_once: int = 3072


class Asker(nn.Module):  # type: ignore[misc]  # torch is not typed here
    """A language model behind a learned mark for each source."""

    def __init__(self, source: str, tokens: Tokens, kinds: int) -> None:
        super().__init__()
        self.reader = Reader(source)
        user = self.reader.embedded(torch.tensor(tokens.ids(["user"])[0][:1]))
        self.kinds = nn.Parameter((user + 0.02 * torch.randn(kinds, self.reader.hidden)).detach())

    def loss(self, tokens: Tensor, kind: Tensor) -> Tensor:
        """Mean nats a token."""
        shown, mark = tokens[:, :-1], self.kinds[kind][:, None]
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.is_cuda):
            inputs = torch.cat([mark, self.reader.embedded(shown)], 1)
            real = torch.cat([torch.ones_like(tokens[:, :1], dtype=torch.bool), shown != 0], 1)
            logits = self.reader.logits(self.reader.states(inputs, real)[tokens != 0])
        return functional.cross_entropy(logits, tokens[tokens != 0] - 1)

    def ask(self, kind: Tensor, end: int, config: Asking) -> list[list[int]]:
        """Tokens of a new prompt of each kind, with the mark of its end if it came to one."""
        from transformers import GenerationConfig

        how = GenerationConfig(
            do_sample=True,
            temperature=1.0,
            top_p=config.top_p,
            top_k=config.top_k,
            max_new_tokens=config.longest_tokens,
            eos_token_id=end - 1,
            pad_token_id=end - 1,
        )
        with torch.no_grad():
            found = self.reader.model.generate(
                inputs_embeds=self.kinds[kind][:, None],
                attention_mask=torch.ones_like(kind)[:, None],
                generation_config=how,
            )
        return [[token + 1 for token in row] for row in found.tolist()]


def ask(
    texts: Sequence[str],
    sources: Sequence[str],
    language_model: str,
    count: int,
    config: Asking,
    *,
    known: frozenset[str] = frozenset(),
    device: str = "cpu",
    progress: Progress = lambda _: None,
) -> list[GeneratedPrompt]:
    """Up to `count` different prompts, none of them among `known`, like `texts` of these sources.

    Raises DataError if the language model cannot be used.
    """
    torch.manual_seed(config.recipe.seed)
    random = np.random.default_rng(config.recipe.seed)
    tokens, (names, kind) = Tokens(language_model), np.unique(sources, return_inverse=True)
    asker = Asker(language_model, tokens, len(names)).to(device)
    _learn(asker, tokens.whole(texts, config.longest_tokens), kind, config.recipe, progress)
    asker.eval().to(torch.float32 if device == "cpu" else torch.bfloat16)
    share = np.bincount(kind) ** config.evened
    found: dict[str, str] = {}
    tries = 0
    while len(found) < count and tries < MOST_TRIES * count:
        drawn = random.choice(len(names), min(config.at_once, count), p=share / share.sum())
        rows = asker.ask(torch.tensor(drawn, device=device), tokens.end, config)
        for source, text in zip(names[drawn], _texts(rows, tokens, config.cut_share, random), strict=True):
            if text and text not in known:
                found.setdefault(text, str(source))
        tries += len(drawn)
    asked = [GeneratedPrompt(text, source) for text, source in found.items()][:count]
    progress(f"{len(asked)} new prompts asked")
    return asked


def _learn(
    asker: Asker, tokens: NDArray[np.int64], kind: NDArray[np.int64], recipe: Recipe, progress: Progress
) -> None:
    """Teaches it the prompts of each source."""
    every = np.arange(len(tokens))
    draw = Draw(tokens, every, every, recipe)
    body, marks = list(asker.reader.parameters()), [asker.kinds]
    rates = [(body, recipe.body_rate), (marks, recipe.head_rate)]
    descent = Descent(rates, draw.batches, recipe, asker.parameters())
    device = asker.kinds.device
    shown, of = torch.tensor(tokens, device=device), torch.tensor(kind, device=device)
    asker.train()
    for epoch in range(recipe.epochs):
        total = torch.zeros((), device=device)
        for drawn in draw.epoch():
            prompts = torch.from_numpy(drawn.prompts).to(device)
            total += descent.step(asker.loss(shown[prompts, : drawn.longest], of[prompts]))
        progress(f"asking, epoch {epoch + 1}/{recipe.epochs}: loss {total.item() / draw.batches:.3f}")


def _texts(
    rows: Sequence[list[int]], tokens: Tokens, cut_share: float, random: np.random.Generator
) -> list[str]:
    """What was asked; nothing for those that did not end and are not kept."""
    ended = [tokens.end in row for row in rows]
    whole = [row[: row.index(tokens.end)] if end else row for row, end in zip(rows, ended, strict=True)]
    kept = np.array(ended) | (random.random(len(rows)) < cut_share)
    told = tokens.texts(whole)
    return [text.strip() if keep else "" for text, keep in zip(told, kept, strict=True)]
