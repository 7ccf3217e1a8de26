"""Sample one token per row. A row's token depends only on its own logits, rules, seed and position.

Order of the rules: penalties, logit bias, grammar, minimum length, temperature, top-k, top-p, min-p. Log
probabilities are those of the model before any rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from site_engine.core.request import Request

if TYPE_CHECKING:
    from site_engine.model.grammar_bitmask import GrammarBitmask

NEG_INF = float("-inf")
TOP_P_CANDIDATES = 64  # tokens that usually hold the nucleus; else a full sort


class Alternatives(NamedTuple):
    """The chosen token's log probability under the unmodified model, and the best tokens beside it."""

    chosen: float
    token_ids: list[int]
    logprobs: list[float]


class Sampled(NamedTuple):
    """One token per row. The logits of `broken` rows were not finite; their tokens are meaningless."""

    token_ids: list[int]
    broken: list[int]
    alternatives: dict[int, Alternatives]


@dataclass(frozen=True, slots=True)
class _Rules:
    """The sampling rules of a batch as tensors, reused while the same rows run."""

    seeds: np.ndarray[tuple[int], np.dtype[np.uint64]]
    random: list[int]  # rows that are not greedy
    temperature: torch.Tensor  # [random rows, 1], as the next three
    top_k: torch.Tensor | None
    top_p: torch.Tensor | None
    min_p: torch.Tensor | None
    penalised: list[int]
    biased: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None  # rows, tokens, numbers
    guided: list[int]  # rows that follow a grammar
    least: list[int]  # rows with a minimum length
    logprobs: list[int]


class Sampler:
    """Samples batches of rows; keeps only the rules of the last batch between calls."""

    def __init__(self, eos_token_ids: Iterable[int], device: torch.device) -> None:
        self._eos = tuple(eos_token_ids)
        self._device = device
        self._known: Sequence[Request] = []
        self._rules: _Rules | None = None
        self.masks: GrammarBitmask | None = None  # created for the first request with a grammar

    def sample(self, requests: Sequence[Request], logits: torch.Tensor) -> Sampled:
        """Sample from logits [rows, vocabulary], one row per request; the logits change in place."""
        with torch.inference_mode():
            return self._sample(requests, logits)

    def _sample(self, requests: Sequence[Request], logits: torch.Tensor) -> Sampled:
        if self._rules is None or requests != self._known:  # requests are equal when they are the same object
            self._rules = _rules(requests, self._device)
            self._known = list(requests)
        rules = self._rules
        logits = logits.float()
        token_ids, broken = _best(logits)
        raw = torch.log_softmax(logits[rules.logprobs], dim=-1) if rules.logprobs else None
        if self._apply_rules(rules, requests, logits):
            token_ids, _ = _best(logits)
        if rules.random:
            random = logits if len(rules.random) == len(requests) else logits[rules.random]
            positions = np.array([requests[row].generated for row in rules.random], dtype=np.uint64)
            uniform = torch.from_numpy(uniforms(rules.seeds, positions)).to(self._device)
            drawn = _draw(random, rules, uniform)
            for row, token_id in zip(rules.random, drawn.tolist(), strict=True):
                token_ids[row] = token_id
        return Sampled(token_ids, broken, _alternatives(requests, rules, raw, token_ids))

    def _apply_rules(self, rules: _Rules, requests: Sequence[Request], logits: torch.Tensor) -> bool:
        """Apply penalties, bias, grammar and minimum length in place; return whether any applied."""
        for row in rules.penalised:
            _penalise(logits[row], requests[row])
        if rules.biased is not None:
            rows, tokens, numbers = rules.biased
            logits.index_put_((rows, tokens), numbers, accumulate=True)
        if rules.guided and self.masks is not None:
            self.masks.allow(requests, rules.guided, logits)
        short = [row for row in rules.least if self._too_short(requests[row])]
        for row in short:
            logits[row, [*self._eos, *requests[row].sampling.stop_token_ids]] = NEG_INF
        return bool(rules.penalised or rules.biased is not None or rules.guided or short)

    def _too_short(self, request: Request) -> bool:
        """Return whether a row may not end yet; a row whose grammar allows only an end may."""
        if request.generated >= request.sampling.min_tokens:
            return False
        ends = [*self._eos, *request.sampling.stop_token_ids]
        return request.guide is None or self.masks is None or not self.masks.must_end(request, ends)


def _best(logits: torch.Tensor) -> tuple[list[int], list[int]]:
    """Return the best token of each row, and the rows with logits that are not finite.

    NaN and infinity win every comparison, so the best logit shows them. On a CPU numpy is ten times faster at
    this than torch.
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


def _rules(requests: Sequence[Request], device: torch.device) -> _Rules:
    rows = [(row, request.sampling) for row, request in enumerate(requests)]
    random = [(row, one) for row, one in rows if not one.greedy]

    def column(numbers: list[float]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.float32, device=device)[:, None]

    ks = [one.top_k for _, one in random]
    biases = [(row, token, bias) for row, one in rows for token, bias in one.logit_bias.items()]
    return _Rules(
        seeds=np.array([seed_of(requests[row]) for row, _ in random], dtype=np.uint64),
        random=[row for row, _ in random],
        temperature=column([one.temperature for _, one in random]),
        top_k=torch.tensor(ks, device=device)[:, None] if any(ks) else None,
        top_p=column([one.top_p for _, one in random]) if any(one.top_p < 1.0 for _, one in random) else None,
        min_p=column([one.min_p for _, one in random]) if any(one.min_p > 0.0 for _, one in random) else None,
        penalised=[
            row
            for row, one in rows
            if one.presence_penalty or one.frequency_penalty or one.repetition_penalty != 1.0
        ],
        biased=_biased(biases, device) if biases else None,
        guided=[row for row, _ in rows if requests[row].guide is not None],
        least=[row for row, one in rows if one.min_tokens > 0],
        logprobs=[row for row, one in rows if one.logprobs is not None],
    )


def _biased(
    biases: list[tuple[int, int, float]], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, tokens, numbers = zip(*biases, strict=True)
    return (
        torch.tensor(rows, device=device),
        torch.tensor(tokens, device=device),
        torch.tensor(numbers, dtype=torch.float32, device=device),
    )


def _penalise(logits: torch.Tensor, request: Request) -> None:
    """Apply penalties in place: repetition by prompt and response, frequency and presence by the response.

    A repeated token is written twice with the same number, so no set of unique tokens is needed.
    """
    one = request.sampling
    if one.repetition_penalty != 1.0:
        seen = torch.tensor(request.tokens, device=logits.device)
        old = logits[seen]
        logits[seen] = torch.where(old > 0, old / one.repetition_penalty, old * one.repetition_penalty)
    output = torch.tensor(request.output, dtype=torch.long, device=logits.device)
    if one.frequency_penalty:
        step = torch.full(output.shape, -one.frequency_penalty, dtype=logits.dtype, device=logits.device)
        logits.index_add_(0, output, step)
    if one.presence_penalty:
        logits[output] = logits[output] - one.presence_penalty


def _draw(logits: torch.Tensor, rules: _Rules, uniform: torch.Tensor) -> torch.Tensor:
    """Draw one token per row from the inverse of the cumulative distribution that the rules leave."""
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
    requests: Sequence[Request], rules: _Rules, raw: torch.Tensor | None, token_ids: list[int]
) -> dict[int, Alternatives]:
    if raw is None:
        return {}
    wanted = [requests[row].sampling.logprobs or 0 for row in rules.logprobs]
    chosen = [token_ids[row] for row in rules.logprobs]
    return dict(zip(rules.logprobs, rank(raw, chosen, wanted), strict=True))


def rank(logprobs: torch.Tensor, chosen: Sequence[int], wanted: Sequence[int]) -> list[Alternatives]:
    """Return the log probability of each row's chosen token and of its `wanted` best tokens.

    `logprobs` is [rows, vocabulary].
    """
    own = logprobs.gather(-1, torch.tensor(chosen, device=logprobs.device)[:, None])[:, 0].tolist()
    best = logprobs.topk(min(max(wanted, default=0), logprobs.shape[-1]), dim=-1)
    ids, numbers = best.indices.tolist(), best.values.tolist()
    return [
        Alternatives(own[row], ids[row][:count], numbers[row][:count]) for row, count in enumerate(wanted)
    ]
