"""Serve the demand for many applications by engines that take turns on one device, or by a model of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from bench.support.adapter_demand import Asked
from bench.support.applications import Place
from bench.support.variant_engines import Query, submit
from site_engine.core.request import Request, Sampling
from site_engine.core.schedule_plan import SchedulePlan
from site_engine.engine.engine import SiteEngine
from tests.support.counted_engine import CountedEngine


class Served(NamedTuple):
    """What a pass over all queries took, with the seconds of each from when it was due to its end."""

    seconds: float
    tokens: int
    latency_s: list[float]
    answers: list[list[int]]

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


class StepEnd(NamedTuple):
    """What an iteration gave: tokens by query, and the queries that ended."""

    told: Sequence[tuple[int, Sequence[int]]]
    ended: Sequence[int]


class Member(Protocol):
    """An engine that takes turns."""

    @property
    def has_work(self) -> bool: ...

    def submit(self, number: int, chain: str, asked: Asked) -> None: ...

    def step(self) -> StepEnd: ...


class Device(Protocol):
    """The time of a device, real or counted."""

    def now_s(self) -> float: ...

    def idle_until(self, at_s: float) -> None: ...


class RealDevice:
    def __init__(self) -> None:
        self._began_s = time.perf_counter()

    def now_s(self) -> float:
        return time.perf_counter() - self._began_s

    def idle_until(self, at_s: float) -> None:
        time.sleep(min(1e-3, max(0.0, at_s - self.now_s())))


class RealMember:
    def __init__(self, engine: SiteEngine) -> None:
        self._engine = engine

    @property
    def has_work(self) -> bool:
        return self._engine.has_work

    def submit(self, number: int, chain: str, asked: Asked) -> None:
        submit(self._engine, str(number), Query(chain, asked.query.prompt), asked.tokens)

    def step(self) -> StepEnd:
        outputs = self._engine.step()
        for output in outputs:
            assert not output.error, output.error
        told = [(int(output.request_id), output.token_ids) for output in outputs]
        return StepEnd(told, [int(output.request_id) for output in outputs if output.finish is not None])


class StepCost(NamedTuple):
    """Seconds of an iteration, by what it computes; the last two where a row has an adapter."""

    always: float
    each_row: float
    each_prompt_token: float
    adapted: float
    each_adapter: float

    def of(self, plan: SchedulePlan, chains: Mapping[str, str]) -> float:
        adapters = {chains.get(chunk.request.id, "") for chunk in plan.chunks} - {""}
        prompts = sum(chunk.length for chunk in plan.prefills)
        base = self.always + self.each_row * len(plan.decoding) + self.each_prompt_token * prompts
        return base + (self.adapted + self.each_adapter * len(adapters) if adapters else 0.0)


class CountedDevice:
    """A device on which time passes by the iterations that are counted."""

    def __init__(self) -> None:
        self.at_s = 0.0

    def now_s(self) -> float:
        return self.at_s

    def idle_until(self, at_s: float) -> None:
        self.at_s = max(self.at_s, at_s)


class CountedMember:
    """The engine's own scheduler, over iterations that take what `cost` says; `adapted` chains cost more."""

    def __init__(
        self, device: CountedDevice, cost: StepCost, adapted: Iterable[str], rows: int, kv_tokens: int
    ) -> None:
        self._adapted = frozenset(adapted)
        self._lengths: dict[str, int] = {}
        self._chains: dict[str, str] = {}
        began_s = device.at_s

        def seconds(plan: SchedulePlan) -> float:
            took_s = cost.of(plan, self._chains)
            device.at_s += took_s
            return took_s

        self._engine = CountedEngine(
            self._lengths, seconds, kv_tokens=kv_tokens, slots=rows, token_budget=2048
        )
        device.at_s = began_s  # an engine measures some iterations before it serves

    @property
    def has_work(self) -> bool:
        return self._engine.scheduler.has_work

    def submit(self, number: int, chain: str, asked: Asked) -> None:
        name = str(number)
        self._lengths[name] = asked.tokens
        self._chains[name] = chain if chain in self._adapted else ""
        sampling = Sampling(max_tokens=asked.tokens, temperature=0.0, ignore_eos=True)
        self._engine.submit(Request(name, [number, *asked.query.prompt[1:]], sampling))

    def step(self) -> StepEnd:
        ended = [int(request.id) for request in self._engine.step()]
        return StepEnd([(number, [0] * self._lengths[str(number)]) for number in ended], ended)


def serve(
    members: Mapping[str, tuple[Member, str]],
    asked: Sequence[Asked],
    due_s: Sequence[float],
    device: Device,
) -> Served:
    """Answer each query when it is due. `members`: the engine and the chain of each application.

    Engines take turns of one iteration: next the one that has used the device least of those that have work;
    one that was idle gets no credit for it.
    """
    engines = list({id(member): member for member, _ in members.values()}.values())
    used_s = dict.fromkeys(map(id, engines), 0.0)
    least_s, at = 0.0, 0
    latency_s, answers = [0.0] * len(asked), [list[int]() for _ in asked]
    while True:
        now_s = device.now_s()
        while at < len(asked) and due_s[at] <= now_s:
            member, chain = members[asked[at].query.chain]
            if not member.has_work:
                used_s[id(member)] = max(used_s[id(member)], least_s)
            member.submit(at, chain, asked[at])
            at += 1
        busy = [member for member in engines if member.has_work]
        if not busy:
            if at == len(asked):
                break
            device.idle_until(due_s[at])
            continue
        member = min(busy, key=lambda one: used_s[id(one)])
        least_s = used_s[id(member)]
        told, ended = member.step()
        now_s, began_s = device.now_s(), now_s
        used_s[id(member)] += now_s - began_s
        for number, new in told:
            answers[number] += new
        for number in ended:
            latency_s[number] = now_s - due_s[number]
    tokens = sum(map(len, answers))
    assert tokens == sum(each.tokens for each in asked)
    return Served(device.now_s(), tokens, latency_s, answers)


def real(places: Mapping[str, Place]) -> dict[str, tuple[Member, str]]:
    """Return the engines of applications as members, each once."""
    found: dict[int, Member] = {id(place.engine): RealMember(place.engine) for place in places.values()}
    return {name: (found[id(place.engine)], place.chain) for name, place in places.items()}


Serve = Callable[[Sequence[Asked], Sequence[float]], Served]
"""(queries, when each is due) -> what the pass took."""
