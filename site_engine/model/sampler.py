"""Sample one token per row. A row's token depends only on its own logits, rules, seed and position.

Rules apply in this order: penalties, grammar, logit bias, minimum length, temperature, top-k, top-p, min-p.
Log probabilities are the model's, before any rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import torch

from site_engine.core.request import Request
from site_engine.model.logit_rules import LogitRules

TOP_P_CANDIDATES = 64  # usually enough to contain the nucleus; otherwise a full sort follows


class Alternatives(NamedTuple):
    """The chosen token's log probability before any rule, and the best tokens with theirs."""

    chosen: float
    token_ids: list[int]
    logprobs: list[float]


class Sampled(NamedTuple):
    """One token per row. Rows in `broken` had logits that are not finite; their tokens are invalid."""

    token_ids: list[int]
    broken: list[int]
    alternatives: dict[int, Alternatives]


@dataclass(frozen=True, slots=True)
class _Draws:
    """The sampling rules of a batch's random rows as tensors, reused while the batch has the same rows."""

    seeds: np.ndarray[tuple[int], np.dtype[np.uint64]]
    random: list[int]  # rows that are not greedy
    temperature: torch.Tensor  # [random rows, 1], as the next three
    top_k: torch.Tensor | None
    top_p: torch.Tensor | None
    min_p: torch.Tensor | None
    logprobs: list[int]


class Sampler:
    """Samples batches of rows. Keeps only the rules of the last batch between calls."""

    def __init__(self, rules: LogitRules, device: torch.device) -> None:
        self._rules = rules
        self._device = device
        self._known: Sequence[Request] = []
        self._draws: _Draws | None = None

    def sample(self, requests: Sequence[Request], logits: torch.Tensor) -> Sampled:
        """Sample from logits [rows, vocabulary], one row per request. Modifies the logits in place."""
        with torch.inference_mode():
            return self._sample(requests, logits)

    def _sample(self, requests: Sequence[Request], logits: torch.Tensor) -> Sampled:
        if self._draws is None or requests != self._known:  # requests are equal when they are the same object
            self._draws = _draws(requests, self._device)
            self._known = list(requests)
        draws = self._draws
        logits = logits.float()
        token_ids, broken = _best(logits)
        raw = torch.log_softmax(logits[draws.logprobs], dim=-1) if draws.logprobs else None
        if self._rules.apply(requests, logits):
            token_ids, _ = _best(logits)
        if draws.random:
            random = logits if len(draws.random) == len(requests) else logits[draws.random]
            positions = np.array([requests[row].generated for row in draws.random], dtype=np.uint64)
            uniform = torch.from_numpy(uniforms(draws.seeds, positions)).to(self._device)
            drawn = _draw(random, draws, uniform)
            for row, token_id in zip(draws.random, drawn.tolist(), strict=True):
                token_ids[row] = token_id
        return Sampled(token_ids, broken, _alternatives(requests, draws, raw, token_ids))


def _best(logits: torch.Tensor) -> tuple[list[int], list[int]]:
    """Return the best token of each row, and the rows with logits that are not finite.

    NaN and infinity win every comparison, so checking the best logit is enough. On a CPU numpy is ten times
    faster at this than torch.
    """
    if logits.device.type == "cpu":
        numbers = logits.numpy()
        best = numbers.argmax(-1)
        top = numbers[np.arange(len(best)), best]
        broken = [] if np.isfinite(top.sum()) else np.flatnonzero(~np.isfinite(top)).tolist()
        return best.tolist(), broken
    top, best_ = logits.max(dim=-1)
    found = torch.stack([best_, torch.isfinite(top).long()]).tolist()  # one copy from the device
    return found[0], [row for row, is_finite in enumerate(found[1]) if not is_finite]


def uniforms(
    seeds: np.ndarray[tuple[int], np.dtype[np.uint64]], positions: np.ndarray[tuple[int], np.dtype[np.uint64]]
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return numbers in [0, 1) that depend only on (seed, position): SplitMix64 used as a counter."""
    z = seeds + (positions + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray[tuple[int], np.dtype[np.uint64]] = z ^ (z >> np.uint64(31))
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def seed_of(request: Request) -> int:
    """Derive a seed from the caller's seed, or else from the request's id, and from the choice."""
    seed = request.sampling.seed
    source = f"name {request.id}" if seed is None else f"seed {seed}"
    return int.from_bytes(blake2b(f"{source} {request.choice}".encode(), digest_size=8).digest(), "little")


def _draws(requests: Sequence[Request], device: torch.device) -> _Draws:
    rows = [(row, request.sampling) for row, request in enumerate(requests)]
    random = [(row, one) for row, one in rows if not one.greedy]

    def column(numbers: list[float]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.float32, device=device)[:, None]

    ks = [one.top_k for _, one in random]
    return _Draws(
        seeds=np.array([seed_of(requests[row]) for row, _ in random], dtype=np.uint64),
        random=[row for row, _ in random],
        temperature=column([one.temperature for _, one in random]),
        top_k=torch.tensor(ks, device=device)[:, None] if any(ks) else None,
        top_p=column([one.top_p for _, one in random]) if any(one.top_p < 1.0 for _, one in random) else None,
        min_p=column([one.min_p for _, one in random]) if any(one.min_p > 0.0 for _, one in random) else None,
        logprobs=[row for row, one in rows if one.logprobs is not None],
    )


def _draw(logits: torch.Tensor, rules: _Draws, uniform: torch.Tensor) -> torch.Tensor:
    """Draw one token per row by inverting the cumulative distribution that remains after the rules."""
    probs = torch.softmax(logits / rules.temperature, dim=-1)
    if rules.top_k is not None:
        most = min(int(rules.top_k.max()), probs.shape[-1])
        ranked = probs.topk(most, dim=-1).values
        least = ranked.gather(-1, (rules.top_k.clamp(1, most) - 1))
        probs = probs.masked_fill((probs < least) & (rules.top_k > 0), 0.0)
    if rules.top_p is not None:
        probs = _top_p(probs, rules.top_p)
    if rules.min_p is not None:
        probs = probs.masked_fill(probs < rules.min_p * probs.amax(-1, keepdim=True), 0.0)
    cumulative = probs.cumsum(dim=-1, dtype=torch.float64)
    target = uniform[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True).clamp_(max=logits.shape[-1] - 1)[:, 0]


def _top_p(probs: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Keep the fewest most likely tokens whose probabilities together reach top_p."""
    goal = top_p * probs.sum(-1, keepdim=True)
    ranked = probs.topk(min(TOP_P_CANDIDATES, probs.shape[-1]), dim=-1).values
    if bool((ranked.sum(-1, keepdim=True) < goal).any()):
        ranked = probs.sort(dim=-1, descending=True).values
    before = ranked.cumsum(dim=-1) - ranked
    least = ranked.masked_fill(before >= goal, float("inf")).amin(-1, keepdim=True)
    return probs.masked_fill((probs < least) & (top_p < 1.0), 0.0)


def _alternatives(
    requests: Sequence[Request], draws: _Draws, raw: torch.Tensor | None, token_ids: list[int]
) -> dict[int, Alternatives]:
    if raw is None:
        return {}
    wanted = [requests[row].sampling.logprobs or 0 for row in draws.logprobs]
    chosen = [token_ids[row] for row in draws.logprobs]
    return dict(zip(draws.logprobs, rank(raw, chosen, wanted), strict=True))


def rank(logprobs: torch.Tensor, chosen: Sequence[int], wanted: Sequence[int]) -> list[Alternatives]:
    """Return the log probability of each row's chosen token and of its `wanted` best tokens.

    `logprobs` is [rows, vocabulary].
    """
    best = logprobs.topk(min(max(wanted, default=0), logprobs.shape[-1]), dim=-1)
    own = logprobs.gather(-1, torch.tensor(chosen, device=logprobs.device)[:, None])[:, 0].tolist()
    ids, numbers = best.indices.tolist(), best.values.tolist()
    return [
        Alternatives(own[row], ids[row][:count], numbers[row][:count]) for row, count in enumerate(wanted)
    ]
