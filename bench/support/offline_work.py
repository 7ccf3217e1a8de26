"""Batches of known lengths for `bench.blend`: recorded traffic, chats, reasoning, few-shot, documents."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

MAX_PROMPT_TOKENS, MAX_RESPONSE_TOKENS = 16_000, 16_000
SYSTEM_TOKENS = 32  # every source has a system prompt of its own
SUBJECTS = 57  # of MMLU: each with a few-shot prefix of its own
PER_DOCUMENT = 4
DOCUMENT_TOKENS = 3000
Random = np.random.Generator


class Line(NamedTuple):
    """A line of `group`, whose lines begin with the same `shared_tokens`."""

    group: int
    shared_tokens: int
    prompt_tokens: int
    response_tokens: int
    source: str = ""


class Cost(NamedTuple):
    """Sizes and measured rates of a model on a device, as in bench/results/gpu.md."""

    body: float = 6.98e9  # Llama-3.1-8B
    head: float = 0.525e9
    kv_token_bytes: float = 131_072
    attention_flop: float = 2 * 4096 * 32  # of a prompt, per squared token
    weight_bytes_per_s: float = 4.2e12  # one H200
    kv_bytes_per_s: float = 3.6e12
    flop_per_s: float = 652e12
    iteration_s: float = 1.2e-3  # the host's part, and what is read besides
    prompts_s: float = 1.2e-3  # more where an iteration has prompts
    kv_tokens: int = 810_000

    def seconds(self, decodes: int, kv_read: int, prompt: int, sampled: int, squares: float) -> float:
        """Return the seconds of an iteration; `squares`: the sum of token x its position over the prompts."""
        tokens, rows = decodes + prompt, decodes + sampled
        multiplied = sum(  # reading weights hides a part of the products only
            math.hypot(2 * numbers / self.weight_bytes_per_s, 2 * numbers * count / self.flop_per_s)
            for numbers, count in ((self.body, tokens), (self.head, rows))
        )
        read_s = kv_read * self.kv_token_bytes / self.kv_bytes_per_s
        fixed_s = self.iteration_s + self.prompts_s * (prompt > 0)
        return fixed_s + multiplied + read_s + 2 * self.attention_flop * squares / self.flop_per_s

    def least(self, lines: list[Line], shared: bool = True) -> tuple[float, float]:
        """Return the seconds of computing all tokens, shared ones once, and of reading all memory."""
        compute_s = read_s = 0.0
        seen: set[int] = set()
        for group, shared_tokens, prompt, response, _ in lines:
            hit = shared_tokens if shared and group in seen else 0
            seen.add(group)
            squares = prompt * prompt / 2 - hit * hit / 2
            compute_s += 2 * (self.body + self.head) * (prompt - hit + response)
            compute_s += 2 * self.attention_flop * squares
            read_s += (prompt + response / 2) * response * self.kv_token_bytes
        return compute_s / self.flop_per_s, read_s / self.kv_bytes_per_s

    def several_at_best_s(self, one_s: float, longest: int, kv_tokens: int, sites: int) -> float:
        """Return the least seconds of several sites, each as quick at its work as one that took `one_s`.

        The site of the longest answer reads all weights once for each of its tokens, beside whatever else it
        holds. What fills its memory in some of these iterations is taken from the others.
        """
        weights_s = self.iteration_s + 2 * (self.body + self.head) / self.weight_bytes_per_s
        full_s = kv_tokens * self.kv_token_bytes / self.kv_bytes_per_s
        alone_s, others = longest * weights_s, sites - 1
        full = max(0.0, (one_s - others * alone_s) / (others * full_s + weights_s + full_s))
        return one_s / sites if full > longest else max(one_s / sites, alone_s + full * full_s)

    def compute_again_s(self, tokens: Sequence[int]) -> float:
        """Return the seconds of computing sequences of so many tokens."""
        products = 2 * self.body * sum(tokens) + self.attention_flop * sum(each * each for each in tokens)
        return products / self.flop_per_s

    def bound(self, lines: list[Line], kv_tokens: int, rows: int, sites: int = 1) -> float:
        """Return seconds that no order can beat where the operators of an iteration run one after another.

        The longest answer takes an iteration a token, each of which reads all weights; all lines take as many
        iterations as they have tokens for the rows, and as memory allows: for their own tokens, and for those
        that a group shares, which are there at least as long as its longest answer runs, or as all of them
        take the rows. Products and reading of weights take least together where every iteration has as many
        tokens, but each with prompts takes longer by itself.
        """
        prompts = decodes = head = squares = read = held = 0.0
        seen: set[int] = set()
        together_of: dict[
            int, tuple[int, int, int]
        ] = {}  # what a group shares, its longest answer, all of them
        for group, shared, prompt, tokens, _ in lines:
            hit = shared if group in seen else 0
            seen.add(group)
            prompts += prompt - hit
            decodes += tokens - 1  # the last token is not computed
            head += tokens
            squares += (prompt * prompt - hit * hit) / 2
            read += (tokens - 1) * (prompt + tokens / 2)
            held += tokens * (prompt - shared + (tokens - 1) / 2)
            most, longest, whole = together_of.get(group, (shared, 0, 0))
            together_of[group] = min(most, shared), max(longest, tokens), whole + tokens
        held += sum(most * max(longest, whole / rows) for most, longest, whole in together_of.values())
        longest = max(line.response_tokens for line in lines)
        together = max(held / kv_tokens, head / rows)
        steps = max(together, longest) if sites == 1 else together
        weights = self.weight_bytes_per_s
        shared_s = steps * self.iteration_s + read * self.kv_token_bytes / self.kv_bytes_per_s
        shared_s += self._least_products_s(steps, prompts, decodes)
        shared_s += math.hypot(2 * self.head * steps / weights, 2 * self.head * head / self.flop_per_s)
        shared_s += 2 * self.attention_flop * squares / self.flop_per_s
        alone_s = longest * (self.iteration_s + 2 * (self.body + self.head) / weights)
        return max(shared_s / sites, alone_s)

    def _least_products_s(self, steps: float, prompts: float, decodes: float) -> float:
        """Return the least seconds of all products but the head's, with what iterations with prompts add.

        So many iterations have prompts, the same number of their tokens each, that the sum is least. Those
        have answers' tokens, too, as long as others have more.
        """

        def products_s(iterations: NDArray[np.float64], tokens: NDArray[np.float64]) -> NDArray[np.float64]:
            read_s = 2 * self.body * iterations / self.weight_bytes_per_s
            return np.hypot(read_s, 2 * self.body * tokens / self.flop_per_s)

        with_prompts = np.linspace(0.0, 1.0, 2001)[1:-1] * steps
        in_these = np.maximum(prompts, (prompts + decodes) * with_prompts / steps)
        beside = prompts + decodes - in_these
        took_s = products_s(with_prompts, in_these) + products_s(steps - with_prompts, beside)
        return float((took_s + self.prompts_s * with_prompts).min())


H200 = Cost()


@cache
def _trace(path: Path) -> tuple[np.ndarray, np.ndarray]:
    rows = pd.read_parquet(path)
    return rows.prompt_tokens.to_numpy(), rows.response_tokens.to_numpy()


@cache
def _lengths(path: Path, source: str, model: str) -> tuple[np.ndarray, np.ndarray]:
    rows = pd.read_parquet(path, columns=["source", "model", "prompt_tokens", "response_tokens"])
    rows = rows[(rows.source == source) & ((rows.model == model) | (not model))]
    return rows.prompt_tokens.to_numpy(), rows.response_tokens.to_numpy()


def _lines(group: int, prompts: np.ndarray, responses: np.ndarray) -> list[Line]:
    prompts = np.clip(prompts, 4, MAX_PROMPT_TOKENS) + SYSTEM_TOKENS
    responses = np.clip(responses, 1, MAX_RESPONSE_TOKENS)
    return [
        Line(group, SYSTEM_TOKENS, int(prompt), int(response))
        for prompt, response in zip(prompts, responses, strict=True)
    ]


def _lognormal(rnd: Random, mean: float, sigma: float, count: int, most: int) -> np.ndarray:
    drawn = np.exp(rnd.normal(0, sigma, count)) / np.exp(sigma**2 / 2) * mean
    clipped: np.ndarray = np.clip(drawn, 4, most)
    return clipped


def trace(name: str) -> Callable[[Path, Random, int], list[Line]]:
    def draw(data: Path, rnd: Random, count: int) -> list[Line]:
        prompts, responses = _trace(data / "traces" / f"{name}.parquet")
        at = rnd.integers(0, len(prompts), count)
        return _lines(0, prompts[at], responses[at])

    return draw


def corpus(source: str, model: str, times: int) -> Callable[[Path, Random, int], list[Line]]:
    """Return a draw of lengths of a corpus; `times`: as many times as long, as thoughts make them."""

    def draw(data: Path, rnd: Random, count: int) -> list[Line]:
        prompts, responses = _lengths(data / "length_corpus.parquet", source, model)
        at = rnd.integers(0, len(prompts), count)
        return _lines(0, prompts[at], times * responses[at])

    return draw


def chats(_data: Path, rnd: Random, count: int) -> list[Line]:
    return _lines(0, _lognormal(rnd, 161, 1.1, count, 1024), _lognormal(rnd, 338, 0.8, count, 1024))


def stories(_data: Path, rnd: Random, count: int) -> list[Line]:
    return _lines(0, rnd.integers(20, 120, count), _lognormal(rnd, 4000, 0.5, count, 12_000))


def few_shot(_data: Path, rnd: Random, count: int) -> list[Line]:
    """Draw questions of one letter's answer, each after the examples of its subject."""
    subjects = rnd.integers(0, SUBJECTS, count)
    prefixes = np.random.default_rng(5).integers(400, 900, SUBJECTS)
    own = rnd.integers(40, 160, count)
    return [
        Line(int(s), int(prefixes[s]), int(prefixes[s] + o), 2) for s, o in zip(subjects, own, strict=True)
    ]


def documents(_data: Path, rnd: Random, count: int) -> list[Line]:
    own, responses = rnd.integers(20, 100, count), _lognormal(rnd, 100, 0.6, count, 600)
    return [
        Line(at // PER_DOCUMENT, DOCUMENT_TOKENS, int(DOCUMENT_TOKENS + own[at]), int(responses[at]))
        for at in range(count)
    ]


SOURCES: dict[str, Callable[[Path, Random, int], list[Line]]] = {
    "azure_code": trace("azure_code"),
    "azure_conv": trace("azure_conv"),
    "alpaca": corpus("alpaca", "text-davinci-003", 1),
    "reasoning": corpus("arena_hard_v2.0", "", 4),
    "chats": chats,
    "stories": stories,
    "few_shot": few_shot,
    "documents": documents,
}


def draw(counts: dict[str, int], data: Path, seed: int) -> list[Line]:
    """Return lines of several sources in a random order; groups of different sources are different."""
    rnd, lines = np.random.default_rng(seed), list[Line]()
    for name, count in counts.items():
        first = 1 + max((line.group for line in lines), default=0)
        lines += [
            line._replace(group=first + line.group, source=name) for line in SOURCES[name](data, rnd, count)
        ]
    return [lines[at] for at in rnd.permutation(len(lines))]


def mix(  # noqa: PLR0917 - a cell of the grid
    compute: str, memory: str, density: float, sharing: float, seconds: float, data: Path, seed: int
) -> list[Line]:
    """Return lines whose computing takes `seconds` before sharing.

    `few_shot` brings the `sharing`, the share of computing that is saved; `compute` and `memory` are mixed
    for the `density`, seconds of computing over seconds of reading memory.
    """
    probe = {
        name: SOURCES[name](data, np.random.default_rng(1), 3000) for name in (compute, memory, "few_shot")
    }
    each = {name: H200.least(lines, shared=False) for name, lines in probe.items()}
    compute_s = {name: c / 3000 for name, (c, _) in each.items()}
    ratio = {name: m / c for name, (c, m) in each.items()}
    shared, whole = H200.least(probe["few_shot"]), each["few_shot"]
    part = min(0.95, sharing / (1 - shared[0] / whole[0]))  # of the seconds, by few_shot
    rest = 1 - part
    wanted = (1 - sharing) / density - part * ratio["few_shot"]  # seconds of memory
    first = (rest * ratio[memory] - wanted) / (ratio[memory] - ratio[compute])
    first = min(rest, max(0.0, first))
    shares = {compute: first, memory: rest - first, "few_shot": part}
    counts = {name: round(seconds * share / compute_s[name]) for name, share in shares.items()}
    return draw({name: count for name, count in counts.items() if count}, data, seed)
