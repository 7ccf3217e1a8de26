"""Serve the lines of an offline batch with a real engine, fed as the gateway feeds a site."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bench.support.offline_orders import Fed
from bench.support.offline_work import Line
from gateway.batches.values import Order
from site_engine.core.remaining_curve import RemainingCurve
from site_engine.core.request import Finish, Lane, Output, Request, Sampling
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


class Forecasts(NamedTuple):
    """Lines as they are forecast, and what a site is told of each."""

    lines: Sequence[Line]
    curves: Sequence[RemainingCurve]


class Serving:
    """Lines on their way through an engine; answers are greedy, and as long as their lines say."""

    def __init__(
        self,
        engine: SiteEngine,
        lines: Sequence[Line],
        how: Order,
        seed: int,
        forecasts: Forecasts | None = None,
    ) -> None:
        """Begin with none; ids differ by `seed`. Without `forecasts` lengths are known."""
        self.lines, self._engine, self._seed = lines, engine, seed
        self._ids = prompts(lines, engine._model.vocab_size, seed)
        self._fed = Fed(lines if forecasts is None else forecasts.lines, how, engine.settings.slots)
        self._curves = None if forecasts is None else forecasts.curves
        self._left: dict[int, int] = {}  # tokens of those whose ends are not known to the engine
        self.ended = Served()

    def step(self) -> bool:
        """Run an iteration. Return False once all lines have ended."""
        tokens, cached, preemptions, iterations = self.ended
        waiting = len(self._engine._scheduler.queue)
        while (at := self._fed.next(waiting)) is not None:
            self._submit(at)
        if not self._engine.has_work:
            assert tokens == sum(line.response_tokens for line in self.lines)
            return False
        for output in self._engine.step():
            at = int(output.request_id.split()[1])
            tokens += self._taken(at, output)
            if output.finish is not None and output.timings is not None:
                assert output.finish is not Finish.FAILED
                self._fed.ended(at)
                cached += output.timings.cached_prompt_tokens
                preemptions += output.timings.preemptions
        self.ended = Served(tokens, cached, preemptions, iterations + 1)
        return True

    def _taken(self, at: int, output: Output) -> int:
        """Return how many tokens of the output the line has; cancel it at its end if only we know that."""
        count = len(output.token_ids)
        if at not in self._left:
            return count
        taken = min(count, self._left[at])
        self._left[at] -= taken
        if taken and not self._left[at] and output.finish is None:
            self._engine.cancel(output.request_id)
        return taken

    def _submit(self, at: int) -> None:
        known = self._curves is None
        rules = Sampling(
            max_tokens=self.lines[at].response_tokens if known else None, ignore_eos=known, temperature=0.0
        )
        name, tenant = f"{self._seed} {at}", str(self._seed)
        request = Request(name, self._ids[at], rules, lane=Lane.BATCH, tenant=tenant)
        request.any_order, request.prefill_heavy = self._fed.any_order, self._fed.heavy[at]
        if self._curves is not None:
            request.remaining = self._curves[at]
            self._left[at] = self.lines[at].response_tokens
        self._engine.submit(request)
