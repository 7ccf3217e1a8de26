"""Demand for many adapters, few of them asked for often, and what an engine makes of it."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from bench.support import workload
from bench.support.variant_engines import Query, submit
from site_engine.core.chain import ServedVariant
from site_engine.engine.engine import SiteEngine


class Asked(NamedTuple):
    query: Query
    tokens: int  # of the answer


class Answered(NamedTuple):
    """What a pass over all queries took; one entry a query in the lists."""

    seconds: float
    tokens: int
    first_token_s: list[float]  # since it was due
    resident: list[bool]  # whether its adapter had a slot when it came
    placed: int  # adapters copied into slots

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def zipf_queries(
    chains: Sequence[str], count: int, exponent: float, *, vocab_size: int, context_tokens: int, seed: int
) -> list[Asked]:
    """Return queries with lengths of Alpaca; the n-th chain is asked for in proportion to n ** -exponent."""
    draw = random.Random(seed)
    weights = list(accumulate((1 + at) ** -exponent for at in range(len(chains))))
    chosen = draw.choices(chains, cum_weights=weights, k=count)
    sized = workload.queries(
        "alpaca", count, vocab_size=vocab_size, context_tokens=context_tokens, repetition=seed
    )
    return [
        Asked(Query(chain, each.prompt), each.response_tokens)
        for chain, each in zip(chosen, sized, strict=True)
    ]


def arrivals(count: int, per_s: float, seed: int = 0) -> list[float]:
    """Return Poisson arrivals in seconds."""
    draw = random.Random(seed)
    return list(accumulate(draw.expovariate(per_s) for _ in range(count)))


def answer_when_due(engine: SiteEngine, asked: Sequence[Asked], due_s: Sequence[float]) -> Answered:
    """Submit each query when it is due, and step until all are answered."""
    store = engine._variants
    assert store is not None
    assert store.slots is not None
    slots, placed, place = store.slots, 0, store.slots._place

    def counted(variant: ServedVariant, slot: int) -> None:
        nonlocal placed
        placed += 1
        place(variant, slot)

    slots._place = counted
    first_s: list[float] = [0.0] * len(asked)
    resident, tokens, at = list[bool](), 0, 0
    began = time.perf_counter()
    while at < len(asked) or engine.has_work:
        now_s = time.perf_counter() - began
        while at < len(asked) and due_s[at] <= now_s:
            resident.append(store.served[asked[at].query.chain] in slots._slots)
            submit(engine, f"asked {at}", asked[at].query, asked[at].tokens)
            at += 1
        if not engine.has_work:
            time.sleep(min(1e-3, max(0.0, due_s[at] - now_s)))
            continue
        outputs = engine.step()
        now_s = time.perf_counter() - began
        for output in outputs:
            assert not output.error, output.error
            number = int(output.request_id.split()[1])
            first_s[number] = first_s[number] or now_s - due_s[number]
            tokens += len(output.token_ids)
    slots._place = place
    assert tokens == sum(each.tokens for each in asked)
    return Answered(time.perf_counter() - began, tokens, first_s, resident, placed)
