"""Drive the engine near its capacity while cancels, releases, deadlines, errors and NaNs happen around it.

The workload's clock counts iterations, so a busy machine does not change the load. A study runs it for half
an hour, a law for seconds.
"""

from __future__ import annotations

import gc
import os
import random
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from site_engine.core.remaining_curve import RemainingCurve, RemainingPoint
from site_engine.core.request import Finish, Lane, Output, Request, RequestRejected, Sampling
from site_engine.engine.build import packed_engine
from site_engine.engine.settings import EngineSettings
from site_engine.model.loader import LoadedModel

DEMO_MODEL = Path(__file__).parents[2] / "mico" / "demo_model" / "weights"
LOAD = 0.95
ITERATION_S = 0.01  # of the workload's time
WARM_UP_STEPS = 1500
SETTINGS = EngineSettings(slots=8, token_budget=128, page_size=16, kv_tokens=560, max_pending=256)
TOO_SHORT = RemainingCurve((RemainingPoint(0, 4.0, 8),))
KNOWN_PROMPTS = 6  # greedy, with an answer that is known: it must come whatever happens around it
KNOWN_TOKENS = 40
STALLED_STEPS = 200
SAMPLES = 60
MAX_GROWTH_MIB = 8.0


class Injected(Exception):
    """An error injected by the soak."""


class WorkTime:
    """A clock that advances with every iteration and skips idle time."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def skip_to(self, when_s: float) -> None:
        self.now_s = max(when_s, self.now_s)


class Faults:
    """The model's forward pass, which now and then fails or returns NaN once it is armed."""

    def __init__(self, forward: Any, rnd: random.Random) -> None:
        self.armed = False
        self.count: Counter[str] = Counter()
        self._forward = forward
        self._rnd = rnd

    def __call__(self, *inputs: torch.Tensor) -> torch.Tensor:
        draw = self._rnd.random() if self.armed else 1.0
        if draw < 0.004:
            self.count["forward_errors"] += 1
            raise Injected("an error in the forward pass")
        logits: torch.Tensor = self._forward(*inputs)
        if draw < 0.006:
            self.count["rows_of_nan"] += 1
            logits[self._rnd.randrange(logits.shape[0])] = float("nan")
        return logits


@dataclass(slots=True)
class Ledger:
    """Open requests, known answers and counts; closed requests are not kept."""

    open: dict[str, Request] = field(default_factory=dict)
    known: dict[str, tuple[list[int], list[int]]] = field(default_factory=dict)  # tokens so far, expected
    count: Counter[str] = field(default_factory=Counter)
    waits_s: list[float] = field(default_factory=list)

    def read(self, outputs: list[Output]) -> None:
        for output in outputs:
            request = self.open[output.request_id]  # KeyError: an output after the last one
            self.count["tokens"] += len(output.token_ids)
            answer = self.known.get(request.id)
            if answer is not None:
                answer[0].extend(output.token_ids)
            if output.finish is not None:
                self._close(request, output)

    def _close(self, request: Request, output: Output) -> None:
        del self.open[request.id]
        self.count[f"ended_by_{output.finish}"] += 1
        tokens, expected = self.known.pop(request.id, ([], []))
        if output.finish is Finish.FAILED:
            self.count["failed_without_reason"] += not output.error
        elif output.finish is not Finish.CANCELLED:
            self.count["known_answers"] += bool(expected)
            self.count["wrong_answers"] += tokens != expected
        if output.timings is not None:
            self.count["preemptions"] += output.timings.preemptions
            self.count["shared_prompt_tokens"] += output.timings.cached_prompt_tokens
            if len(self.waits_s) < 100_000:
                self.waits_s.append(output.timings.queued_s + output.timings.prefill_s)


class Sample(NamedTuple):
    minute: float
    rss_mib: float
    objects: int


class Soak:
    def __init__(self, model: LoadedModel, seed: int) -> None:
        self.rnd = random.Random(seed)
        self.clock = WorkTime()
        self.engine = packed_engine(model, SETTINGS, self.clock)
        self.ledger = Ledger()
        self._vocab_size = model.vocab_size
        self._prompts = [self._tokens(self.rnd.randint(5, 60)) for _ in range(KNOWN_PROMPTS)]
        self._answers = [self._alone(prompt) for prompt in self._prompts]
        runner: Any = self.engine.runner
        self.faults = runner._forward = Faults(runner._forward, self.rnd)
        self._idle_steps = 0

    def _alone(self, prompt: list[int]) -> list[int]:
        sampling = Sampling(max_tokens=KNOWN_TOKENS, temperature=0.0, ignore_eos=True)
        self.engine.submit(Request("alone", prompt, sampling))
        found: list[int] = []
        while self.engine.has_work:
            found += [token for output in self.engine.step() for token in output.token_ids]
        return found

    def _tokens(self, count: int) -> list[int]:
        return [self.rnd.randrange(10, self._vocab_size) for _ in range(count)]

    def ask(self, number: int) -> None:
        """Submit one query of the mix; three in a hundred are too long and must be refused."""
        rnd = self.rnd
        request = self._known(number) if rnd.random() < 0.3 else self._random(number)
        if rnd.random() < 0.03:
            request = Request(request.id, self._tokens(SETTINGS.kv_tokens or 0), request.sampling)
        try:
            self.engine.submit(request)
        except RequestRejected as refused:
            self.ledger.count[f"refused_{refused.reason}"] += 1
            self.ledger.known.pop(request.id, None)
            return
        self.ledger.count["taken"] += 1
        self.ledger.open[request.id] = request

    def _known(self, number: int) -> Request:
        which = self.rnd.randrange(KNOWN_PROMPTS)
        sampling = Sampling(max_tokens=KNOWN_TOKENS, temperature=0.0, ignore_eos=True)
        self.ledger.known[str(number)] = ([], self._answers[which])
        return Request(str(number), self._prompts[which], sampling, remaining=TOO_SHORT)

    def _random(self, number: int) -> Request:
        rnd = self.rnd
        sampling = Sampling(
            max_tokens=rnd.choice([1, 8, 30, 80, 200]),
            temperature=rnd.choice([0.0, 0.7, 1.2]),
            top_p=rnd.choice([1.0, 0.9]),
            top_k=rnd.choice([0, 40]),
            frequency_penalty=rnd.choice([0.0, 0.5]),
            logprobs=rnd.choice([None, None, 3]),
            prompt_logprobs=rnd.random() < 0.05,
            min_tokens=rnd.choice([0, 4]),
            stop=rnd.choice([(), ("the",)]),
        )
        beginning = rnd.choice([[], self._prompts[0][:32], self._prompts[1][:32]])
        request = Request(str(number), beginning + self._tokens(rnd.randint(1, 80)), sampling)
        request.remaining = TOO_SHORT
        request.lane = rnd.choice([Lane.CHAT, Lane.CHAT, Lane.BATCH])
        request.tenant = f"tenant {number // 20}"
        if rnd.random() < 0.05:
            request.deadline_s = self.clock() + 2 * rnd.random()
        return request

    def _computed(self) -> float:
        """Return what changes with each iteration that was computed."""
        return sum(kind.squares[0][0] for kind in self.engine._meter.fit._kinds)

    def step(self) -> None:
        """Run one iteration; now and then cancel a request or release a pending one."""
        if self.ledger.open and self.rnd.random() < 0.004:
            self.engine.cancel(self.rnd.choice(list(self.ledger.open)))
        if self.ledger.open and self.rnd.random() < 0.002:
            for name in self.engine.release([self.rnd.choice(list(self.ledger.open))]):
                del self.ledger.open[name]
                self.ledger.known.pop(name, None)
                self.ledger.count["released"] += 1
        computed = self._computed()
        outputs = self.engine.step()
        self.ledger.read(outputs)
        self._idle_steps = 0 if outputs or self._computed() != computed else self._idle_steps + 1
        if self._idle_steps > STALLED_STEPS and self.engine.has_work:
            raise RuntimeError(
                f"{self._idle_steps} steps without work done, {len(self.ledger.open)} open requests"
            )
        self.ledger.count["iterations"] += 1
        self.ledger.count["rows"] += len(self.engine._scheduler.running)
        self.clock.now_s += ITERATION_S

    def capacity(self, steps: int = WARM_UP_STEPS) -> float:
        """Return requests per second when there is always a queue, with all faults."""
        began, number = self.clock(), 0
        while self.ledger.count["iterations"] < steps:
            while len(self.ledger.open) < 3 * SETTINGS.slots:
                number += 1
                self.ask(-number)
            self.step()
        ended, seconds = number - len(self.ledger.open), self.clock() - began
        while self.engine.has_work:
            self.step()
        return ended / seconds

    def run(self, minutes: float, rate: float) -> list[Sample]:
        samples: list[Sample] = []
        began, number = time.monotonic(), 0
        next_s = self.clock()
        while (minute := (time.monotonic() - began) / 60) < minutes:
            if minute >= len(samples) * minutes / SAMPLES:
                samples.append(sample(minute))
            if not self.engine.has_work:
                self.clock.skip_to(next_s)
            while next_s <= self.clock():
                self.ask(number)
                number += 1
                next_s += self.rnd.expovariate(rate)
            self.step()
        self.faults.armed = False
        while self.engine.has_work:
            self.step()
        samples.append(sample(minute))
        return samples

    def left(self) -> dict[str, int]:
        """Return the resources that are still in use; all should be 0."""
        scheduler, pool, load = self.engine._scheduler, self.engine._pool, self.engine.load()
        if scheduler.kv_cache_manager.prefixes is not None:
            scheduler.kv_cache_manager.prefixes.clear()
        return {
            "open_requests": len(self.ledger.open) + load.running + load.pending,
            "pages": pool.capacity - pool.free,
            "reserved_tokens": scheduler.reservation.reserved_tokens(),
            "slots": SETTINGS.slots - scheduler.free_slots,
            "queued_tokens": load.pending_prompt_tokens,
            "tenants_remembered": max(0, len(scheduler.queue._clocks) - SETTINGS.max_pending),
        }


def sample(minute: float) -> Sample:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Sample(minute, pages * os.sysconf("SC_PAGE_SIZE") / 2**20, len(gc.get_objects()))


def growth(samples: list[Sample]) -> float:
    """Return the MiB by which the last quarter's median lies above the second quarter's; the first one warms
    up.
    """
    quarter = max(1, len(samples) // 4)
    before = statistics.median(one.rss_mib for one in samples[quarter : 2 * quarter])
    return statistics.median(one.rss_mib for one in samples[-quarter:]) - before
