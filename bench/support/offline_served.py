"""Serve the lines of an offline batch with a real engine, fed as the gateway feeds a site."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bench.support.offline_orders import Fed
from bench.support.offline_work import Line
from gateway.batches.values import Order
from site_engine.core.request import Lane, Request, Sampling
from site_engine.engine.engine import SiteEngine

ORDERS = {
    "arrival": Order.FILE,
    "longest": Order.LONGEST,
    "prefix": Order.PREFIX,
    "blend": Order.BLEND,
}


class Served(NamedTuple):
    """What has ended of a batch. `cached_tokens`: of prompts, not computed."""

    tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    iterations: int = 0


def prompts(lines: Sequence[Line], vocab_size: int, seed: int) -> list[list[int]]:
    """Return random ids for each line; those of a group begin with the same ones."""
    rnd = np.random.default_rng(seed)
    shared = {line.group: rnd.integers(10, vocab_size, line.shared_tokens).tolist() for line in lines}
    return [
        [
            *shared[line.group],
            *rnd.integers(10, vocab_size, line.prompt_tokens - line.shared_tokens).tolist(),
        ]
        for line in lines
    ]


class Serving:
    """Lines on their way through an engine; lengths are known and exact, answers greedy."""

    def __init__(self, engine: SiteEngine, lines: Sequence[Line], how: Order, seed: int) -> None:
        """Begin with none; ids differ by `seed`."""
        self.lines, self._engine, self._seed = lines, engine, seed
        self._ids = prompts(lines, engine._model.vocab_size, seed)
        self._fed = Fed(lines, how, engine.settings.slots)
        self.ended = Served()

    def step(self) -> bool:
        """Run an iteration. Return False once all lines have ended."""
        tokens, cached, preemptions, iterations = self.ended
        while (at := self._fed.next()) is not None:
            self._submit(at)
        if not self._engine.has_work:
            assert tokens == sum(line.response_tokens for line in self.lines)
            return False
        for output in self._engine.step():
            tokens += len(output.token_ids)
            if output.finish is not None and output.timings is not None:
                self._fed.ended(int(output.request_id.split()[1]))
                cached += output.timings.cached_prompt_tokens
                preemptions += output.timings.preemptions
        self.ended = Served(tokens, cached, preemptions, iterations + 1)
        return True

    def _submit(self, at: int) -> None:
        rules = Sampling(max_tokens=self.lines[at].response_tokens, ignore_eos=True, temperature=0.0)
        name, tenant = f"{self._seed} {at}", str(self._seed)
        request = Request(name, self._ids[at], rules, lane=Lane.BATCH, tenant=tenant)
        request.any_order, request.prefill_heavy = self._fed.any_order, self._fed.heavy[at]
        self._engine.submit(request)
