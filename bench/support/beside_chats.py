"""Chats that arrive as in a trace at an engine that trains beside them, in the time of the clock."""

from __future__ import annotations

import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, Protocol

from site_engine.core.request import Request, Sampling
from site_engine.core.slack import Bounds, Deferral
from site_engine.core.training import Failed, StepDone, TrainingOrder
from site_engine.engine.build import packed_engine
from site_engine.engine.engine import SiteEngine
from site_engine.engine.settings import EngineSettings
from site_engine.model.loader import LoadedModel
from site_engine.training.job import open_job

SHRINK = 16
"""Prompts and answers are so much shorter than the trace's for the demo model, which is smaller by more."""
MAX_TOKENS = 96
BETWEEN_S = 0.05
"""Bound of the time between tokens while a job is trained."""
WAIT_S = 0.4
WARM_UP = 8
ALONE_S = 15.0
"""For which a job trains alone."""


class Timer(Protocol):
    """What the module `time` is: a clock, and waiting by it."""

    def monotonic(self) -> float: ...
    def sleep(self, seconds: float, /) -> None: ...


class Chat(NamedTuple):
    """`at`: its arrival, in mean times between two."""

    at: float
    prompt: list[int]
    tokens: int


class Served(NamedTuple):
    first_s: list[float]
    between_s: list[float]
    trained_per_s: float
    per_token_s: list[float]  # from arrival to the end, of each chat that ended

    def marks_s(self) -> tuple[float, float, float]:
        """Return the 99th percentile and the longest of the first tokens, and the 99th between tokens."""
        return p99(self.first_s), max(self.first_s, default=0.0), p99(self.between_s)


def chats_of(
    trace: Path | None,
    count: int,
    vocabulary: int,
    first: int = 0,
    *,
    shrink: int = SHRINK,
    longest: int = MAX_TOKENS,
) -> list[Chat]:
    """Return the chats of a trace from a first one on; without a trace arrivals at random, of lengths as
    chats have them. Prompts and answers are shorter by `shrink`, and have `longest` tokens at most.
    """
    draw, rows = Random(5 + first), list[tuple[float, float, float]]()
    if trace is not None:
        import pandas as pd

        frame = pd.read_parquet(trace)[first : first + count]
        rows = list(zip(frame["arrival_s"], frame["prompt_tokens"], frame["response_tokens"], strict=True))
    for _ in range(count - len(rows)):
        at = draw.expovariate(1.0) + (rows[-1][0] if rows else 0.0)
        rows.append((at, draw.lognormvariate(6.5, 0.8), draw.lognormvariate(5.0, 0.7)))
    gap = (rows[-1][0] - rows[0][0]) / max(1, count - 1) or 1.0

    def short(tokens: float) -> int:
        return max(2, min(longest, int(tokens / shrink)))

    return [
        Chat(
            (at - rows[0][0]) / gap, [draw.randrange(vocabulary) for _ in range(short(prompt))], short(answer)
        )
        for at, prompt, answer in rows
    ]


def engine_of(model: LoadedModel, deferral: Deferral, timer: Timer = time) -> SiteEngine:
    """Return an engine that knows what its iterations cost."""
    bounds = Bounds(between_tokens_s=BETWEEN_S, deferral=deferral, wait_s=WAIT_S)
    engine = packed_engine(model, EngineSettings(slots=8, kv_tokens=8192, training=bounds), timer.monotonic)
    for number in range(WARM_UP):
        engine.submit(Request(f"warm-up {number}", [1] * (1 + 8 * number), Sampling(max_tokens=8)))
        while number % 2 and engine.has_work:
            engine.step()
    return engine


def serve(
    engine: SiteEngine,
    chats: Sequence[Chat],
    gap_s: float,
    seconds: float | None = None,
    timer: Timer = time,
) -> Served:
    """Answer chats that arrive `gap_s` apart on average, beside a new job if any; without `seconds`, all.

    Tokens trained a second count up to the last optimizer step that ended: one may take a second.
    """
    began_s, waiting = timer.monotonic(), list(reversed(chats))
    arrived: dict[str, float] = {}
    last: dict[str, float] = {}
    first_s, between_s = list[float](), list[float]()
    trained, trained_at_s = 0, 0.0  # tokens of the optimizer steps that have ended, and when the last did
    per_token_s = list[float]()
    while now_s := timer.monotonic() - began_s:
        if (seconds is not None and now_s >= seconds) or (seconds is None and not (waiting or arrived)):
            break
        while waiting and waiting[-1].at * gap_s <= now_s:
            chat = waiting.pop()
            name, sampling = str(len(waiting)), Sampling(max_tokens=chat.tokens, ignore_eos=True)
            arrived[name] = chat.at * gap_s
            engine.submit(Request(name, chat.prompt, sampling))
        if not engine.has_work:
            timer.sleep(min(0.005, max(0.0, waiting[-1].at * gap_s - now_s)) if waiting else 0.005)
            continue
        for output in engine.step():
            at_s, name = timer.monotonic() - began_s, output.request_id
            (between_s if name in last else first_s).append(at_s - last.get(name, arrived[name]))
            last[name] = at_s
            if output.finish is not None:
                per_token_s.append((at_s - arrived[name]) / output.completion_tokens)
                del last[name], arrived[name]
        for _, event in engine.training.take_events():
            if isinstance(event, Failed):
                raise RuntimeError(event.reason)
            if isinstance(event, StepDone):
                trained, trained_at_s = event.trained_tokens, timer.monotonic() - began_s
    return Served(first_s, between_s, trained / trained_at_s if trained else 0.0, per_token_s)


def p99(values: Sequence[float]) -> float:
    """Return the 99th percentile, which is at most the longest: of few values others lie beyond."""
    return statistics.quantiles(values, n=100, method="inclusive")[98] if len(values) > 1 else 0.0


class OtherProcess:
    """A process that trains without end, and nothing else, on the cores of this one."""

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self._trained, self._begun = 0, threading.Event()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:  # the tokens trained so far, after each step
            self._trained = int(line)
            self._begun.set()
        self._begun.set()

    def beside(self, run: Callable[[], Served]) -> Served:
        """Run while it trains; the tokens trained are its own. It has ended afterwards."""
        self._begun.wait()
        before, began_s = self._trained, time.monotonic()
        served = run()
        per_s = (self._trained - before) / (time.monotonic() - began_s)
        self._process.kill()
        self._process.wait()
        return served._replace(trained_per_s=per_s)


def measure(
    model: LoadedModel,
    order: TrainingOrder,
    chats: Sequence[Chat],
    loads: Sequence[float],
    *,
    other: Sequence[str],
) -> dict[str, Any]:
    """Answer the same chats at parts of what the engine can, alone, beside training by both rules, and beside
    a process that trains, which the command `other` starts.
    """

    def trains(deferral: Deferral) -> SiteEngine:
        engine = engine_of(model, deferral)
        engine.training.begin("bench", "bench", open_job(model, order, time.monotonic))
        return engine

    began_s = time.monotonic()
    serve(engine_of(model, Deferral.SLICE), chats, 0.0)
    chat_s = (time.monotonic() - began_s) / len(chats)
    training_per_s = serve(trains(Deferral.SLICE), (), 1.0, ALONE_S).trained_per_s
    found: dict[str, Any] = {"chats_per_s": 1 / chat_s, "training_alone_tokens_per_s": training_per_s}
    for load in loads:
        gap_s = chat_s / load
        alone = serve(engine_of(model, Deferral.SLICE), chats, gap_s)
        figures: dict[str, tuple[float, ...]] = {"alone": alone.marks_s()}
        found[f"at {load}"] = figures
        for rule in (*Deferral, "two processes"):
            if isinstance(rule, Deferral):
                beside = serve(trains(rule), chats, gap_s)
            else:
                engine = engine_of(model, Deferral.SLICE)
                beside = OtherProcess(other).beside(partial(serve, engine, chats, gap_s))
            share = beside.trained_per_s / training_per_s if training_per_s else 0.0
            figures[str(rule)] = (*beside.marks_s(), share)
        print(f"  load {load}:", flush=True)
        for name, (first_s, longest_s, between_s, *trained) in figures.items():
            print(
                f"    {name}: first token p99 {1000 * first_s:.1f} ms, longest {1000 * longest_s:.1f}; "
                f"between tokens p99 {1000 * between_s:.1f}; of training alone {trained}",
                flush=True,
            )
    return found
