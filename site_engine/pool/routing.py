"""Choose the engine of a pool for a request: the one where it is predicted to finish first.

An engine that has computed the prompt's beginning for the same tenant saves the time that this takes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from math import ceil
from typing import NamedTuple

from site_engine.core.load import IterationCost, LoadFigures
from site_engine.core.request import Request
from site_engine.pool.rebalancing import Room

BLOCK_TOKENS = 32
UNKNOWN_ITERATION_S = 0.01
"""Of engines that have computed nothing."""


class Work(NamedTuple):
    """Requests that an engine has been given since its report."""

    requests: int = 0
    prompt_tokens: int = 0
    response_tokens: float = 0.0

    def with_one(self, other: Work) -> Work:
        return Work(
            self.requests + other.requests,
            self.prompt_tokens + other.prompt_tokens,
            self.response_tokens + other.response_tokens,
        )


class Engine(NamedTuple):
    """The state of an engine: its last report, and the work that it was given since."""

    load: LoadFigures
    slots: int
    kv_tokens: int
    given: Work

    def room(self) -> Room:
        """Return the room for further requests, after all that the engine's own are expected to need."""
        load, given = self.load, self.given
        waiting_tokens = load.pending_prompt_tokens + load.pending_response_tokens
        growing_tokens = load.kv_reserved_tokens + load.running_weight * sum(load.running_remaining)
        given_tokens = given.prompt_tokens + given.response_tokens
        return Room(
            self.slots - load.running - load.pending - given.requests,
            load.kv_free_tokens - waiting_tokens - growing_tokens - given_tokens,
        )


def work_of(request: Request, generated: int = 0) -> Work:
    """Return the work that a request with `generated` tokens is expected to bring."""
    begun = len(request.resumed) + generated
    limit = request.sampling.max_tokens
    left = None if limit is None else float(max(1, limit - begun))
    expected = request.remaining.expected(begun)
    if left is not None:
        expected = left if request.sampling.runs_out and request.grammar is None else min(left, expected)
    return Work(1, len(request.prompt) + begun, expected)


def finish_s(work: Work, cached_tokens: int, engine: Engine, cost: IterationCost) -> float:
    """Predict the seconds until a request finishes in an engine.

    It waits for a slot and for memory, its prompt for those before it, and each token takes an iteration.
    """
    load, slots, given = engine.load, max(1, engine.slots), engine.given
    requests = load.running + load.pending + given.requests
    rows = min(slots, requests + 1)
    iteration_s = cost.seconds(rows, rows, max(0, engine.kv_tokens - load.kv_free_tokens))
    iteration_s = iteration_s or load.seconds_per_iteration or UNKNOWN_ITERATION_S
    iteration_s += load.training_s_per_iteration
    waiting_tokens = load.pending_response_tokens + given.response_tokens
    unread = max(0, load.unread_tokens - load.running) + load.pending_prompt_tokens + given.prompt_tokens
    expected = load.kv_reserved_tokens + load.pending_prompt_tokens + given.prompt_tokens + waiting_tokens
    short = work.prompt_tokens - cached_tokens + work.response_tokens - (load.kv_free_tokens - expected)
    each = max(1.0, (engine.kv_tokens - load.kv_free_tokens) / max(1, load.running))
    must_end = max(requests + 1 - slots, min(ceil(short / each), requests))
    iterations = 0.0
    if must_end > 0:
        place = (must_end - 1) // load.running_weight
        ends = load.running_remaining
        all_ends = (load.running_weight * sum(ends) + waiting_tokens) / slots
        iterations = ends[place] if place < len(ends) else max([all_ends, *ends[-1:]])
    prefill_s = cost.per_token_s * (unread + work.prompt_tokens - cached_tokens)
    return iterations * iteration_s + prefill_s + work.response_tokens * iteration_s


def choose(work: Work, cached_tokens: Sequence[int], engines: Sequence[Engine], cost: IterationCost) -> int:
    """Return the place of the engine where a request finishes first; of equals the one with least to do."""

    def key(place: int) -> tuple[float, int]:
        engine = engines[place]
        requests = engine.load.running + engine.load.pending + engine.given.requests
        return finish_s(work, cached_tokens[place], engine, cost), requests

    return min(range(len(engines)), key=key)


class PrefixIndex:
    """The beginnings of prompts that an engine was given, in blocks, as many as its memory holds.

    An engine may have evicted one: then a request merely goes where its prompt is computed again.
    """

    def __init__(self, kv_tokens: int) -> None:
        self._most = max(1, kv_tokens // BLOCK_TOKENS)
        self._known: OrderedDict[int, None] = OrderedDict()

    def add(self, blocks: Sequence[int]) -> None:
        for block in reversed(blocks):  # the first ones stay longest: without them the others are of no use
            self._known[block] = None
            self._known.move_to_end(block)
        while len(self._known) > self._most:
            self._known.popitem(last=False)

    def cached_tokens(self, blocks: Sequence[int]) -> int:
        """Return the tokens of the longest known beginning."""
        for count, block in enumerate(blocks):
            if block not in self._known:
                return count * BLOCK_TOKENS
        return len(blocks) * BLOCK_TOKENS


def blocks_of(prompt: Sequence[int], owner: Hashable) -> list[int]:
    """Return a number for each beginning of a prompt, in whole blocks. `owner`: who may share it."""
    return list(_chained(prompt, hash(owner)))


def _chained(prompt: Sequence[int], number: int) -> Iterator[int]:
    for at in range(0, len(prompt) - BLOCK_TOKENS, BLOCK_TOKENS):
        number = hash((number, *prompt[at : at + BLOCK_TOKENS]))
        yield number
