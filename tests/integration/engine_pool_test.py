"""Several engine processes as one engine: each answer is whole, whichever of them are lost meanwhile."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

from site_engine.core.chain import Chain, Variant
from site_engine.core.request import Finish, Output, Request, Sampling
from site_engine.engine import process_messages as pm
from site_engine.engine.process_client import EngineProcess
from site_engine.engine_client import Facts, Listener, LoadSeen
from site_engine.errors import ConfigError, NotServed, Reason, VariantRefused
from site_engine.pool import rebalancing
from site_engine.pool.pool import EnginePool
from tests.support.child_processes import is_there
from tests.support.fake_engine_process import LETTERS, UNSERVABLE, fake_settings, spawn_fake
from tests.support.heard_engine import WITHIN_S, HeardEngine, run
from tests.support.site_fakes import CONTEXT_TOKENS


@dataclass
class Heard(HeardEngine):
    """A pool, and everything that it reports."""

    facts: Facts = field(kw_only=True)

    @property
    def pool(self) -> EnginePool:
        return self.engine

    async def serving(self, count: int) -> None:
        """Wait until so many engines serve. Each load report is a look."""

        def look() -> bool:
            self.pool.request_load()
            return len(self.pool.pids) == count

        await self.until(look)

    async def lost(self, pid: int) -> None:
        """Wait until a process serves no more. Another may serve in its place by then."""

        def look() -> bool:
            self.pool.request_load()
            return pid not in self.pool.pids.values()

        await self.until(look)


def launched(count: int = 2, **settings: object) -> AbstractAsyncContextManager[Heard]:
    return launched_with([fake_settings(**settings)] * count)


@asynccontextmanager
async def launched_with(settings: list[dict[str, Any]]) -> AsyncIterator[Heard]:
    pool = await EnginePool.launch(settings, time.monotonic, spawn_fake)
    try:
        heard = Heard(pool, facts=await pool.ready())
        pool.vocabulary = LETTERS
        pool.start(heard.listener())
        yield heard
    finally:
        await asyncio.to_thread(pool.stop)


def test_requests_are_spread_and_the_figures_are_sums() -> None:
    async def scenario() -> None:
        async with launched(slots=1, iteration_floor_s=0.1) as heard:
            assert heard.facts.kv_tokens == 2 * CONTEXT_TOKENS
            assert heard.facts.context_tokens == CONTEXT_TOKENS
            for name in ("a", "b"):
                assert await heard.submit(name, max_tokens=30) is None
            await heard.until(lambda: heard.text("a") and heard.text("b"))
            await heard.until(lambda: heard.loads[-1].figures.running == 2)
            assert heard.loads[-1].figures.kv_free_tokens == 0
            heard.pool.cancel(["a", "unknown"])
            await heard.until(lambda: heard.finishes("a"))
            await heard.until(lambda: heard.finishes("b"))
            assert (heard.finishes("a"), heard.finishes("b")) == ([Finish.CANCELLED], [Finish.LENGTH])
            assert heard.text("b") == "abc" * 10
            await heard.until(lambda: heard.loads[-1].figures.running == 0)

    run(scenario())


@dataclass
class Counted:
    """What a pool has by what it has told, beside what each of its reports counts."""

    changed: asyncio.Event
    has: set[str] = field(default_factory=set)
    reports: list[tuple[int, int, int]] = field(default_factory=list)

    def outputs(self, outputs: Sequence[Output]) -> None:
        self.has.difference_update(each.request_id for each in outputs if each.finish is not None)
        self.changed.set()

    def admitted(self, name: str, answer: NotServed | None) -> None:
        if not isinstance(answer, NotServed):
            self.has.add(name)
        self.changed.set()

    def released(self, name: str, decisions: list[bool]) -> None:
        self.has.difference_update([name] * decisions[0])
        self.changed.set()

    def load(self, seen: LoadSeen) -> None:
        devices = sum(each.running + each.pending for each in seen.figures.devices)
        self.reports.append((seen.figures.running + seen.figures.pending, devices, len(self.has)))
        self.changed.set()


def test_each_report_counts_what_is_admitted_and_has_not_ended() -> None:
    """Also where an engine has told of neither since its own last report, and where a request has moved."""

    async def scenario() -> None:
        async with launched(slots=3, iteration_floor_s=0.002) as heard:
            pool, counted = heard.pool, Counted(heard.changed)
            pool._listener = Listener(counted.outputs, counted.load, heard.broken.append)
            draw, moves = random.Random(5), 0
            for number in range(120):
                request = Request(f"q{number}", (97, 98, 99), Sampling(max_tokens=draw.randrange(1, 40)))
                pool.submit([request], partial(counted.admitted, request.id))
                for one in draw.choices(sorted(counted.has), k=2) if counted.has else ():
                    moves += (place := pool.requests.where(one)) is not None and pool.requests.move(
                        one, 1 - place
                    )
                    if number % 7 == 1:
                        pool.release([[one]], partial(counted.released, one))
                asked = request.id
                await heard.until(lambda: asked in counted.has or asked not in pool.requests.owned)  # noqa: B023
                await heard.until(lambda: len(counted.has) < 10)
            await heard.until(lambda: not pool.requests.owned and not counted.has)
            assert min(len(counted.reports), moves) > 10
            assert [each for each in counted.reports if len({*each}) > 1] == []

    run(scenario())


def test_an_engine_with_half_of_256_streams_is_killed_and_every_stream_goes_on_within_a_deadline() -> None:
    """A stream takes five seconds: none ends before the kill, on a machine that does much else, too."""
    STREAMS, TOKENS, DEADLINE_S = 256, 50, 20.0  # noqa: N806

    async def scenario() -> None:
        async with launched(slots=STREAMS, max_pending=STREAMS, iteration_floor_s=0.1) as heard:
            names = [f"{at:03} go" for at in range(STREAMS)]
            admitted = await asyncio.gather(*(heard.submit(name, name, max_tokens=TOKENS) for name in names))
            assert admitted == [None] * STREAMS
            await heard.until(lambda: {each.request_id for each in heard.outputs} == {*names})
            pids, moved = heard.pool.pids, {name for name in names if heard.pool.requests.where(name) == 0}
            assert len(moved) > STREAMS / 4
            os.kill(pids[0], signal.SIGKILL)
            async with asyncio.timeout(DEADLINE_S):
                await heard.lost(pids[0])
                begun = len(heard.outputs)
                ended = {name for name in moved if heard.finishes(name)}
                await heard.until(
                    lambda: moved - ended <= {each.request_id for each in heard.outputs[begun:]}
                )
            await heard.until(lambda: all(heard.finishes(name) for name in names))
            tokens = dict.fromkeys(names, 0)
            for each in heard.outputs:
                tokens[each.request_id] += len(each.token_ids)
                assert each.completion_tokens == tokens[each.request_id]  # none twice, none missing
            for name in names:
                assert heard.finishes(name) == [Finish.LENGTH]
                assert heard.text(name) == (name * TOKENS)[:TOKENS]
            await heard.serving(2)
            assert heard.broken == []
            assert heard.pool.pids[1] == pids[1]
            assert heard.pool.pids[0] != pids[0]
            totals = [each.figures.tokens_total for each in heard.loads]
            assert totals == sorted(totals)

    run(scenario())


def test_what_waits_for_admission_when_its_engine_dies_is_admitted_by_the_other() -> None:
    async def scenario() -> None:
        async with launched() as heard:
            for pid in heard.pool.pids.values():
                os.kill(pid, signal.SIGSTOP)
            waiting = [asyncio.create_task(heard.submit(name, max_tokens=5)) for name in ("a", "b")]
            await asyncio.sleep(0)
            first, second = heard.pool.pids.values()
            os.kill(first, signal.SIGKILL)
            os.kill(second, signal.SIGCONT)
            assert await asyncio.gather(*waiting) == [None, None]
            await heard.until(lambda: heard.finishes("a") and heard.finishes("b"))
            assert (heard.text("a"), heard.text("b")) == ("abcab", "abcab")

    run(scenario())


def test_a_request_that_loses_engine_after_engine_fails() -> None:
    async def scenario() -> None:
        async with launched(4, slots=4, iteration_floor_s=1.0) as heard:
            await heard.submit("poison", max_tokens=60)
            for _ in range(3):
                await heard.until(lambda: heard.pool.requests.where("poison") is not None)
                place = heard.pool.requests.where("poison")
                assert place is not None
                os.kill(heard.pool.pids[place], signal.SIGKILL)
                await heard.until(
                    lambda place=place: (
                        heard.finishes("poison") or heard.pool.requests.where("poison") not in {place, None}
                    )
                )
            assert heard.finishes("poison") == [Finish.FAILED]
            assert heard.text("poison") == ("abc" * 60)[: len(heard.text("poison"))]
            assert heard.broken == []

    run(scenario())


def test_without_any_engine_the_pool_is_broken_once() -> None:
    async def scenario() -> None:
        async with launched(iteration_floor_s=1.0) as heard:
            await heard.submit("a", max_tokens=60)
            for pid in heard.pool.pids.values():
                os.kill(pid, signal.SIGKILL)
            await heard.until(lambda: heard.broken)
            assert heard.finishes("a") == [Finish.FAILED]
            refused = await heard.submit("late")
            assert isinstance(refused, NotServed)
            assert refused.reason is Reason.INTERNAL
            decided: list[list[bool]] = []
            heard.pool.release([["a"]], decided.append)
            assert decided == [[False]]
            assert heard.pool.stalled_s() == 0.0
        assert len(heard.broken) == 1

    run(scenario())


def test_groups_are_released_by_their_engines() -> None:
    async def scenario() -> None:
        async with launched(slots=1, iteration_floor_s=0.5) as heard:
            for name in ("a", "b", "c", "d"):
                await heard.submit(name, max_tokens=60)
            decided: list[list[bool]] = []

            def note(found: list[bool]) -> None:
                decided.append(found)
                heard.changed.set()

            heard.pool.release([["a"], ["c"], ["unknown"], ["d"], ["c", "d"]], note)
            await heard.until(lambda: decided)
            assert decided == [[False, True, False, True, False]]
            heard.pool.cancel(["a", "b", "c"])
            await heard.until(lambda: heard.finishes("a") and heard.finishes("b"))
            assert not heard.finishes("c")

    run(scenario())


def test_an_engine_that_the_machine_cannot_start_now_is_started_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where the memory is gone with which the engine was lost."""

    async def scenario() -> None:
        async with launched() as heard:
            launch, tries = heard.pool._starter.launch, list[int]()

            async def no_memory_at_first(place: int) -> EngineProcess:
                tries.append(place)
                if len(tries) == 1:
                    raise OSError(errno.ENOMEM, "Cannot allocate memory")
                return await launch(place)

            monkeypatch.setattr(heard.pool._starter, "launch", no_memory_at_first)
            pid = heard.pool.pids[1]
            os.kill(pid, signal.SIGKILL)
            await heard.lost(pid)
            await heard.serving(2)
            assert tries == [1, 1]

    run(scenario())


def test_a_model_that_cannot_be_served_is_refused() -> None:
    async def scenario() -> None:
        settings = [fake_settings(), fake_settings(model=UNSERVABLE)]
        pool = await EnginePool.launch(settings, time.monotonic, spawn_fake)
        try:
            await pool.ready()
        except ConfigError as refused:
            assert "cannot be served" in str(refused)
        else:
            raise AssertionError("it was ready")
        finally:
            pids = [each.process.pid for each in pool._replicas]
            pool.kill()
            async with asyncio.timeout(WITHIN_S):
                while any(is_there(pid, as_zombie=True) for pid in pids):  # noqa: ASYNC110 - nothing reports it
                    await asyncio.sleep(0.01)

    run(scenario())


def test_what_waits_goes_to_an_engine_that_has_room_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rebalancing, "LOOK_EVERY_S", 0.05)

    async def scenario() -> None:
        async with launched(slots=1, iteration_floor_s=0.1) as heard:
            for name in ("a", "b", "c"):
                await heard.submit(name, max_tokens=9 if name == "c" else 58)
            await heard.until(lambda: heard.text("a") and heard.text("b"))
            full = heard.pool.requests.where("c")
            assert full is not None
            other = next(name for name in ("a", "b") if heard.pool.requests.where(name) != full)
            heard.pool.cancel([other])
            await heard.until(lambda: heard.text("c"))
            assert heard.pool.requests.where("c") == 1 - full
            stays = "a" if other == "b" else "b"
            assert not heard.finishes(stays)
            await heard.until(lambda: heard.finishes("c"))
            assert heard.text("c") == "abc" * 3
            heard.pool.cancel([stays])
            await heard.until(lambda: heard.loads[-1].figures.running == 0)
            devices = heard.loads[-1].figures.devices
            assert [each.device for each in devices] == ["auto.0", "auto.1"]
            assert [each.moved_in for each in devices] == [int(at != full) for at in (0, 1)]

    run(scenario())


@pytest.mark.parametrize("end", ["its last token", "a loss"])
def test_a_request_that_ends_while_it_leaves_gives_its_place_back(end: str) -> None:
    async def scenario() -> None:
        async with launched(iteration_floor_s=0.5) as heard:
            await heard.submit("a", max_tokens=50)
            await heard.until(lambda: heard.text("a"))
            source = heard.pool.requests.where("a")
            assert source is not None
            os.kill(heard.pool.pids[source], signal.SIGSTOP)
            assert heard.pool.requests.move("a", 1 - source)
            process = heard.pool._replicas[source].process
            last = pm.Detail(0, True, Finish.LENGTH, "", None, [], [])
            process.data_received(pm.frame(pm.Step([1], [97], [last])))  # it crosses what was asked
            assert heard.finishes("a") == [Finish.LENGTH]
            assert not heard.pool.requests.places.are_free
            os.kill(heard.pool.pids[source], signal.SIGCONT if end == "its last token" else signal.SIGKILL)
            await heard.until(lambda: heard.pool.request_load() or heard.pool.requests.places.are_free)

    run(scenario())


def asked(ask: Callable[[Callable[[str], None]], None]) -> asyncio.Future[str]:
    answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    ask(answer.set_result)
    return answer


def test_a_pool_sleeps_once_its_requests_have_ended_and_wakes_as_it_was() -> None:
    """Where it cannot wake it says why, and sleeps on."""

    async def scenario() -> None:
        settings = [fake_settings(iteration_floor_s=0.01)] * 2
        async with launched_with(settings) as heard:
            sleeping, pids = heard.pool.sleeping, list(heard.pool.pids.values())
            added: asyncio.Future[Chain | VariantRefused] = asyncio.get_running_loop().create_future()
            heard.pool.add_variant(Variant("acme", "/acme"), added.set_result)
            assert isinstance(await added, Chain)
            await heard.submit("a", max_tokens=30)
            slept = asked(sleeping.sleep)
            refused = await heard.submit("b")
            assert isinstance(refused, NotServed)
            assert refused.reason is Reason.MODEL_UNKNOWN
            assert await asyncio.wait_for(slept, WITHIN_S) == ""
            assert heard.text("a") == ("abc" * 30)[:30]
            assert heard.pool.pids == {}
            assert not any(is_there(pid, as_zombie=True) for pid in pids)
            heard.loads.clear()
            heard.pool.request_load()
            (report,) = heard.loads
            assert report.figures.kv_free_tokens == heard.facts.kv_tokens
            assert report.figures.tokens_total == 30
            assert [(each.lost, each.losses) for each in report.figures.devices] == [(False, 0)] * 2
            assert heard.pool.stalled_s() == 0.0
            settings[1] = fake_settings(model=UNSERVABLE)
            assert "cannot be served" in await asyncio.wait_for(asked(sleeping.wake), WITHIN_S)
            assert (heard.pool.pids, sleeping.asleep) == ({}, True)
            settings[1] = settings[0]
            assert await asyncio.wait_for(asked(sleeping.wake), WITHIN_S) == ""
            assert len(heard.pool.pids) == 2
            answer: asyncio.Future[NotServed | None] = asyncio.get_running_loop().create_future()
            heard.pool.submit(
                [Request("c", (97, 98), Sampling(max_tokens=3), chain="acme")], answer.set_result
            )
            assert await asyncio.wait_for(answer, WITHIN_S) is None
            await heard.until(lambda: heard.finishes("c"))
            assert heard.broken == []

    run(scenario())


def test_a_pool_that_is_woken_before_it_sleeps_goes_on_also_where_an_engine_is_lost(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Woken twice, the lost engine is started once."""

    async def scenario() -> None:
        async with launched(iteration_floor_s=0.2) as heard:
            for name in ("a", "b"):
                await heard.submit(name, max_tokens=58)
            await heard.until(lambda: heard.text("a") and heard.text("b"))
            slept = asked(heard.pool.sleeping.sleep)
            pid = heard.pool.pids[0]
            os.kill(pid, signal.SIGKILL)
            await heard.lost(pid)
            assert await asked(heard.pool.sleeping.wake) == ""
            assert await slept == "it was woken before its requests had ended"
            asked(heard.pool.sleeping.sleep)
            assert await asked(heard.pool.sleeping.wake) == ""
            await heard.serving(2)
            await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})
            assert caplog.text.count("serves again") == 1
            assert await heard.submit("c", max_tokens=5) is None
            await heard.until(lambda: heard.finishes("c") and len(heard.text("a")) > 9 < len(heard.text("b")))
            for name in ("a", "b"):
                assert heard.text(name) == ("abc" * 58)[: len(heard.text(name))]

    run(scenario())


def test_a_pool_that_loses_its_engine_while_it_is_to_sleep_sleeps_and_wakes() -> None:
    async def scenario() -> None:
        async with launched(1, iteration_floor_s=0.2) as heard:
            await heard.submit("a", max_tokens=58)
            slept = asked((sleeping := heard.pool.sleeping).sleep)
            os.kill(heard.pool.pids[0], signal.SIGKILL)
            assert (await asyncio.wait_for(slept, WITHIN_S), await asked(sleeping.wake)) == ("", "")
            assert await heard.submit("b", max_tokens=3) is None
            assert (heard.finishes("a"), heard.broken) == ([Finish.FAILED], [])

    run(scenario())
