"""The same requests through an engine in this process and through one in a process of its own."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from random import Random
from typing import Any

from site_engine.config import SiteConfig
from site_engine.core.remaining_curve import RemainingCurve, RemainingPoint
from site_engine.core.request import Finish, Output, Request, Sampling
from site_engine.engine.engine_thread import EngineThread
from site_engine.engine.process_client import EngineProcess
from site_engine.engine_client import Listener
from site_engine.native import NativeEngine, engine_settings, prompt_tokenizer
from tests.support.engine_models import family, tokenizer
from tests.support.family_process import load_family, spawn_family

WITHIN_S = 600.0
SHORT = RemainingCurve((RemainingPoint(0, 3.0, 4),))
"""A forecast that most answers outgrow: the pages that they need are then others'."""
KEPT_OUT = 12  # requests at once
LOOK_EVERY_S = 0.05
"""The time between two looks at whether more requests may begin."""
GRAMMARS = (
    "start: /[a-z]{2,9}/",
    'start: %json {"type": "object", "properties": {"n": {"type": "integer", "maximum": 99, "minimum": 0}}, '
    '"required": ["n"], "additionalProperties": false}',
    "start: /(.|\\n){1,12}/",
)
STOPS = ("a", "e", " ", "\u00e9", "th", "the", "2,", "\n", "is", "0", "\u3042")


@dataclass(frozen=True, slots=True)
class Case:
    """One request. It is cancelled after `cancel_after` outputs, if not 0."""

    prompt: tuple[int, ...]
    sampling: Sampling
    grammar: str = ""
    resumed: tuple[int, ...] = ()
    resumed_chars: int = 0
    cancel_after: int = 0
    choices: int = 1


@dataclass(slots=True)
class Result:
    """All that was said of one choice."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    prompt_logprobs: list[Any] = field(default_factory=list)
    finish: Finish | None = None
    error: str = ""
    completion_tokens: int = 0
    stop_sequence: str = ""
    has_timings: bool = False
    outputs: int = field(default=0, compare=False)
    preemptions: int = field(default=0, compare=False)

    def add(self, output: Output) -> None:
        assert self.finish is None, "an output after the last one"
        self.text += output.text
        self.token_ids += output.token_ids
        self.logprobs += [(each.token, each.raw, [top.token for top in each.top]) for each in output.logprobs]
        self.prompt_logprobs += [(each.token, each.raw) for each in output.prompt_logprobs]
        self.finish, self.error = output.finish, output.error
        self.completion_tokens = output.completion_tokens
        self.stop_sequence = output.stop_sequence
        self.has_timings = output.timings is not None
        self.outputs += 1
        self.preemptions = 0 if output.timings is None else output.timings.preemptions


def random_cases(count: int, seed: int) -> list[Case]:
    """Requests of every kind: stop strings, end tokens, least lengths, grammars, log probabilities, resumed
    answers, several choices, cancels. Prompts share beginnings.
    """
    draw = Random(seed)
    vocabulary = len(tokenizer())
    beginnings = [tuple(draw.randrange(256) for _ in range(draw.randrange(1, 24))) for _ in range(8)]
    return [_case(draw, vocabulary, draw.choice(beginnings)) for _ in range(count)]


def _case(draw: Random, vocabulary: int, beginning: tuple[int, ...]) -> Case:
    def some(chance: float) -> bool:
        return draw.random() < chance

    prompt = (*beginning, *(draw.randrange(vocabulary) for _ in range(draw.randrange(1, 30))))
    logprobs = draw.randrange(4) if some(0.15) else None
    sampling = Sampling(
        max_tokens=draw.choice([0, 1, 2, 7, 20, 45, None]) if some(0.6) else draw.randrange(1, 60),
        temperature=0.0,
        stop=tuple(draw.sample(STOPS, draw.randrange(1, 4))) if some(0.5) else (),
        stop_token_ids=(draw.randrange(256),) if some(0.2) else (),
        min_tokens=draw.randrange(1, 12) if some(0.2) else 0,
        ignore_eos=some(0.3),
        logprobs=logprobs,
        prompt_logprobs=logprobs is not None and some(0.4),
        presence_penalty=0.7 if some(0.1) else 0.0,
    )
    resumed: tuple[int, ...] = ()
    if logprobs is None and some(0.2):
        resumed = tuple(draw.randrange(vocabulary) for _ in range(draw.randrange(1, 10)))
    return Case(
        prompt,
        sampling,
        "" if resumed or some(0.8) else draw.choice(GRAMMARS),
        resumed,
        draw.randrange(3) if resumed else 0,
        draw.randrange(1, 6) if some(0.1) else 0,
        2 if some(0.1) and not resumed else 1,
    )


@asynccontextmanager
async def engine(name: str, *, separate: bool, **settings: Any) -> AsyncIterator[tuple[NativeEngine, int]]:
    """The engine of a family that is not started yet, and the id of the process where it is."""
    loop = asyncio.get_running_loop()
    chosen = {"slots": 6, "token_budget": 48, "page_size": 4, "kv_tokens": 240, "max_pending": 64} | settings
    config = SiteConfig(site="alpha", gateways=("127.0.0.1:1",), model=name, **chosen)
    post = loop.call_soon_threadsafe
    if separate:
        process = await EngineProcess.launch(engine_settings(config), time.monotonic, spawn_family)
        facts, process.vocabulary = await process.ready(), family(name).served.vocabulary
        prompts = prompt_tokenizer(tokenizer(), facts, post, allow_special_tokens=False)
        client, pid = NativeEngine(prompts, process), process.pid
    else:
        loaded = load_family(config)
        prompts = prompt_tokenizer(tokenizer(), loaded.facts, post, allow_special_tokens=False)
        client, pid = NativeEngine(prompts, EngineThread(loaded.engine, post, time.monotonic)), 0
    try:
        yield client, pid
    finally:
        await asyncio.to_thread(client.stop)


def always() -> bool:
    return True


async def answer_all(
    client: NativeEngine, cases: Sequence[Case], grammars: Any, may_begin: Callable[[], bool] = always
) -> list[list[Result]]:
    """Return the results of each case, by choice. A case begins while `may_begin`."""
    run = _Run(client, cases, grammars, may_begin)
    client.start(Listener(run.outputs, lambda seen: None, run.broken))
    async with asyncio.timeout(WITHIN_S):
        while not run.done.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(run.done.wait(), LOOK_EVERY_S)
            run.submit_more()
    assert not run.reason, run.reason
    return run.results


class _Run:
    def __init__(
        self, client: NativeEngine, cases: Sequence[Case], grammars: Any, may_begin: Callable[[], bool]
    ) -> None:
        self.may_begin = may_begin
        self.client, self.cases, self.grammars = client, cases, grammars
        self.results = [[Result() for _ in range(case.choices)] for case in cases]
        self.waiting = list(reversed(range(len(cases))))
        self.open = 0
        self.reason = ""
        self.done = asyncio.Event()
        asyncio.get_running_loop().call_soon(self.submit_more)

    def outputs(self, outputs: Sequence[Output]) -> None:
        for output in outputs:
            at, choice = map(int, output.request_id.split("/"))
            result, case = self.results[at][choice], self.cases[at]
            result.add(output)
            if result.outputs == case.cancel_after and result.finish is None:
                self.client.cancel([output.request_id])
            self.open -= result.finish is not None
        self.submit_more()

    def broken(self, reason: str) -> None:
        self.reason = reason
        self.done.set()

    def submit_more(self) -> None:
        while self.waiting and self.open < KEPT_OUT and self.may_begin():
            at = self.waiting.pop()
            case = self.cases[at]
            grammar = self.grammars.compile(case.grammar, "") if case.grammar else None
            group = [
                Request(
                    f"{at}/{choice}",
                    case.prompt,
                    case.sampling,
                    SHORT,
                    choice=choice,
                    resumed=case.resumed,
                    resumed_chars=case.resumed_chars,
                    grammar=grammar,
                    follows=bool(at % 2),
                )
                for choice in range(case.choices)
            ]
            self.open += len(group)
            self.client.submit(None, group, lambda answer, at=at: self._answered(at, answer))  # type: ignore[arg-type,misc]
        if not (self.waiting or self.open):
            self.done.set()

    def _answered(self, at: int, answer: Any) -> None:
        if isinstance(answer, Exception):
            for result in self.results[at]:
                result.finish, result.error = Finish.FAILED, f"refused: {answer}"
            self.open -= len(self.results[at])
            self.submit_more()


def differences(cases: Sequence[Case], here: list[list[Result]], there: list[list[Result]]) -> list[str]:
    """Return what differs. Of a cancelled answer the shorter has to begin the longer."""
    found = []
    for at, (case, ours, theirs) in enumerate(zip(cases, here, there, strict=True)):
        for one, other in zip(ours, theirs, strict=True):
            if Finish.CANCELLED in {one.finish, other.finish}:
                length = min(len(one.token_ids), len(other.token_ids))
                same = case.cancel_after and one.token_ids[:length] == other.token_ids[:length]
                same = same and (one.text.startswith(other.text) or other.text.startswith(one.text))
            else:
                same = one == other
            if not same:
                pairs = (
                    (each.name, getattr(one, each.name), getattr(other, each.name)) for each in fields(one)
                )
                found.append(f"{at}: {case}: {[each for each in pairs if each[1] != each[2]]}")
    return found


@dataclass(frozen=True, slots=True)
class Compared:
    """The results of both ways, and the CPU seconds of all processes."""

    here: list[list[Result]]
    there: list[list[Result]]
    here_cpu_s: float
    there_cpu_s: float


async def compare(name: str, cases: Sequence[Case], **settings: Any) -> Compared:
    from site_engine.text.grammar import Grammars

    grammars = Grammars(tokenizer(), family(name).served.vocab_size, ())
    results, seconds = [], []
    for separate in (False, True):
        async with engine(name, separate=separate, **settings) as (client, pid):
            began_s = cpu_seconds(pid)
            results.append(await answer_all(client, cases, grammars))
            seconds.append(cpu_seconds(pid) - began_s)
    return Compared(results[0], results[1], seconds[0], seconds[1])


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of this process and, if `pid` is not 0, of that one."""
    own_s = time.process_time()
    if not pid:
        return own_s
    after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return own_s + sum(map(int, after_name[11:13])) / os.sysconf("SC_CLK_TCK")
