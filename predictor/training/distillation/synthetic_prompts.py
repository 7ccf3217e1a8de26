"""Generate prompts similar to those of a corpus with a language model that is fine-tuned on the corpus.

Generated prompts have no answers. Their only training targets are teachers' forecasts. Requires torch and
transformers. Used in training only.
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
from predictor.training.distillation.lm_teacher import ChatTokenizer, LanguageModelEncoder
from predictor.training.train_loop import BatchSampler, ScheduledOptimizer, TrainConfig

Progress = Callable[[str], None]
MAX_DRAWS_PER_PROMPT = 4
"""The maximum number of samples per requested prompt. Small corpora yield many duplicates."""
FINE_TUNING = TrainConfig(
    epochs=3, batch_prompts=256, body_rate=2e-4, head_rate=2e-4, warm_share=0.05, seed=100
)


@dataclass(frozen=True, slots=True)
class PromptGeneratorConfig:
    """Hyperparameters of fine-tuning and sampling. The card of an artifact stores the fields by name."""

    recipe: TrainConfig = FINE_TUNING
    longest_tokens: int = 140
    """Prompts are truncated to this length."""
    top_p: float = 0.97
    top_k: int = 300
    cut_share: float = 0.5
    """Share of the unfinished prompts that are kept, truncated."""
    evened: float = 0.7
    """Sources are sampled in proportion to this power of their number of prompts."""
    at_once: int = 3072
    """Batch size of sampling."""


class PromptGenerator(nn.Module):  # type: ignore[misc]  # torch is not typed here
    """A language model that is conditioned on a learned embedding of the source."""

    def __init__(self, language_model: str, tokenizer: ChatTokenizer, sources: int) -> None:
        super().__init__()
        self.encoder = LanguageModelEncoder(language_model)
        user = self.encoder.embed(torch.tensor(tokenizer.encode(["user"])[0][:1]))
        self.sources = nn.Parameter((user + 0.02 * torch.randn(sources, self.encoder.hidden)).detach())

    def loss(self, tokens: Tensor, source: Tensor) -> Tensor:
        """Return the mean loss in nats per token of prompts `[prompts, tokens]` with sources `[prompts]`."""
        previous, start = tokens[:, :-1], self.sources[source][:, None]
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.is_cuda):
            inputs = torch.cat([start, self.encoder.embed(previous)], 1)
            mask = torch.cat([torch.ones_like(tokens[:, :1], dtype=torch.bool), previous != 0], 1)
            logits = self.encoder.logits(self.encoder.states(inputs, mask)[tokens != 0])
        return functional.cross_entropy(logits, tokens[tokens != 0] - 1)

    def generate(self, source: Tensor, end: int, config: PromptGeneratorConfig) -> list[list[int]]:
        """Return the ids of a new prompt for each source. Finished prompts include the end token."""
        from transformers import GenerationConfig

        sampling = GenerationConfig(
            do_sample=True,
            temperature=1.0,
            top_p=config.top_p,
            top_k=config.top_k,
            max_new_tokens=config.longest_tokens,
            eos_token_id=end - 1,
            pad_token_id=end - 1,
        )
        with torch.no_grad():
            generated = self.encoder.model.generate(
                inputs_embeds=self.sources[source][:, None],
                attention_mask=torch.ones_like(source)[:, None],
                generation_config=sampling,
            )
        return [[token + 1 for token in row] for row in generated.tolist()]


def generate_prompts(
    texts: Sequence[str],
    sources: Sequence[str],
    language_model: str,
    count: int,
    config: PromptGeneratorConfig,
    *,
    excluded: frozenset[str] = frozenset(),
    device: str = "cpu",
    progress: Progress = lambda _: None,
) -> list[GeneratedPrompt]:
    """Return up to `count` distinct prompts similar to `texts` of `sources`, none of them in `excluded`.

    Raises DataError if the language model cannot be used.
    """
    torch.manual_seed(config.recipe.seed)
    random = np.random.default_rng(config.recipe.seed)
    tokenizer, (names, source) = ChatTokenizer(language_model), np.unique(sources, return_inverse=True)
    generator = PromptGenerator(language_model, tokenizer, len(names)).to(device)
    tokens = tokenizer.encode_padded(texts, config.longest_tokens)
    _fine_tune(generator, tokens, source, config.recipe, progress)
    generator.eval().to(torch.float32 if device == "cpu" else torch.bfloat16)
    share = np.bincount(source) ** config.evened
    source_of: dict[str, str] = {}
    draws = 0
    while len(source_of) < count and draws < MAX_DRAWS_PER_PROMPT * count:
        drawn = random.choice(len(names), min(config.at_once, count), p=share / share.sum())
        rows = generator.generate(torch.tensor(drawn, device=device), tokenizer.end, config)
        decoded = _decode(rows, tokenizer, config.cut_share, random)
        for name, text in zip(names[drawn], decoded, strict=True):
            if text and text not in excluded:
                source_of.setdefault(text, str(name))
        draws += len(drawn)
    prompts = [GeneratedPrompt(text, name) for text, name in source_of.items()][:count]
    progress(f"{len(prompts)} new prompts asked")
    return prompts


def _fine_tune(
    generator: PromptGenerator,
    tokens: NDArray[np.int64],
    source: NDArray[np.int64],
    config: TrainConfig,
    progress: Progress,
) -> None:
    """Train the generator on the prompts of each source."""
    all_rows = np.arange(len(tokens))
    sampler = BatchSampler(tokens, all_rows, all_rows, config)
    body, embeddings = list(generator.encoder.parameters()), [generator.sources]
    rates = [(body, config.body_rate), (embeddings, config.head_rate)]
    optimizer = ScheduledOptimizer(rates, sampler.batches, config, generator.parameters())
    device = generator.sources.device
    prompts, source_of_prompt = torch.tensor(tokens, device=device), torch.tensor(source, device=device)
    generator.train()
    for epoch in range(config.epochs):
        total = torch.zeros((), device=device)
        for batch in sampler.epoch():
            chosen = torch.from_numpy(batch.prompts).to(device)
            loss = generator.loss(prompts[chosen, : batch.longest], source_of_prompt[chosen])
            total += optimizer.step(loss)
        progress(f"asking, epoch {epoch + 1}/{config.epochs}: loss {total.item() / sampler.batches:.3f}")


def _decode(
    rows: Sequence[list[int]], tokenizer: ChatTokenizer, cut_share: float, random: np.random.Generator
) -> list[str]:
    """Return the generated texts, empty for unfinished ones that are discarded."""
    finished = [tokenizer.end in row for row in rows]
    ids = [row[: row.index(tokenizer.end)] if end else row for row, end in zip(rows, finished, strict=True)]
    kept = np.array(finished) | (random.random(len(rows)) < cut_share)
    return [text.strip() if keep else "" for text, keep in zip(tokenizer.decode(ids), kept, strict=True)]
