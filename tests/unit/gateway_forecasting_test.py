"""Forecasts beside the event loop or on it: whatever the forecaster does, every query gets one."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from gateway.domain import Caller, Lane, Query, Sampling
from gateway.ending import Ending
from gateway.outcome import Outcome, Status
from gateway.query.forecasting import (
    MAX_BATCH,
    MAX_BATCH_LINES,
    MAX_LEARNED_CHARS,
    QUERY_CHARS,
    ForecastService,
)
from predictor.artifact import GRAPH_FILE, LEXICAL_NAME, SHIPPED, read_card, write
from predictor.forecast import Forecast
from predictor.histogram import HistogramForecaster
from predictor.hot_reload import HotReloadForecaster
from predictor.onnx_forecaster import Features
from predictor.outcome_log import OutcomeLog, log_files


class Forgetful:
    """Answers for all queries but the last."""

    name = "forgetful"

    def forecast(self, queries: Sequence[Features]) -> list[Forecast]:
        return [Forecast((0, 100), (1.0,), self.name) for _ in queries[1:]]


def query(name: str, prompt: str = "hi") -> Query:
    return Query(name, "m", prompt, Sampling(), Caller("k", "t"), 0.0, 100.0)


def test_a_forecaster_that_answers_too_few_is_replaced_by_the_fallback() -> None:
    async def scenario() -> None:
        forecasts = ForecastService(Forgetful(), HistogramForecaster())
        async with asyncio.timeout(60):
            found = await asyncio.gather(*(forecasts.request(query(f"q{i}")) for i in range(3)))
        assert {each.source for each in found} == {"histogram:m"}
        await forecasts.close()

    asyncio.run(scenario())


class Broken:
    name = "broken"

    def forecast(self, queries: Sequence[Features]) -> list[Forecast]:
        raise RuntimeError("no such luck")


def test_a_failure_of_the_fallback_reaches_those_who_wait_and_those_who_come_later() -> None:
    async def scenario() -> None:
        forecasts = ForecastService(Broken(), Broken())
        for round_ in range(2):
            async with asyncio.timeout(60):
                waiting = (forecasts.request(query(f"q{round_}{i}")) for i in range(3))
                found = await asyncio.gather(*waiting, return_exceptions=True)
            assert all(isinstance(each, RuntimeError) for each in found)
        await forecasts.close()

    asyncio.run(scenario())


LONG = "l" * 2 * QUERY_CHARS


class Watched:
    """Tells which texts it forecast together, and whether on the loop's thread or beside it."""

    name = "watched"

    def __init__(self) -> None:
        self.batches: list[tuple[list[str], bool]] = []

    def forecast(self, queries: Sequence[Features]) -> list[Forecast]:
        on_loop = threading.current_thread() is threading.main_thread()
        self.batches.append(([each.text for each in queries], on_loop))
        return [Forecast((0, 100), (1.0,), self.name) for _ in queries]


@pytest.mark.parametrize("quick", [True, False])
def test_only_what_comes_in_one_turn_and_is_known_to_be_quick_is_forecast_on_the_loop(
    quick: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.query.forecasting.MAX_INLINE_S", float("inf") if quick else -1.0)
    watched = Watched()

    async def scenario() -> None:
        forecasts = ForecastService(watched, HistogramForecaster())

        async def together(*texts: str) -> None:
            await asyncio.gather(*(forecasts.request(query(text, text)) for text in texts))

        async with asyncio.timeout(60):
            await together(LONG)  # the first of its length is not known to be quick
            await together(LONG)
            await together("a", "b")
            await together(LONG, "c")  # together longer than what was quick
            line = msgspec.structs.replace(query("hi", "hi"), lane=Lane.BATCH)
            await asyncio.gather(forecasts.request(line), forecasts.request_ahead(line))
        await forecasts.close()

    asyncio.run(scenario())
    on_loop = {text: on_loop for texts, on_loop in watched.batches[1:] for text in texts}
    assert not watched.batches[0][1]
    assert on_loop == {LONG: False, "a": quick, "b": quick, "c": False, "hi": False}
    if quick:
        assert watched.batches[1:3] == [([LONG], True), (["a", "b"], True)]


def test_a_prompt_of_which_little_is_read_does_not_let_many_texts_onto_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gateway.query.forecasting.MAX_INLINE_S", float("inf"))
    watched = Watched()

    async def scenario() -> None:
        forecasts = ForecastService(watched, HistogramForecaster())
        async with asyncio.timeout(60):
            await forecasts.request(query("huge", "a" * 1_000_000))
            await asyncio.gather(*(forecasts.request(query(f"q{i}", "b" * 2_000)) for i in range(MAX_BATCH)))
        await forecasts.close()

    asyncio.run(scenario())
    assert not any(on_loop for _, on_loop in watched.batches)


@pytest.mark.parametrize("cheap", [True, False])
def test_a_busy_loop_forecasts_only_what_costs_it_less_than_the_thread_would(
    cheap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.query.forecasting.MAX_INLINE_S", float("inf"))
    monkeypatch.setattr("gateway.query.forecasting.MAX_BUSY_INLINE_S", float("inf") if cheap else -1.0)
    watched, busy = Watched(), False

    async def scenario() -> None:
        nonlocal busy
        forecasts = ForecastService(watched, HistogramForecaster(), loop_is_busy=lambda: busy)
        async with asyncio.timeout(60):
            await forecasts.request(query("first", "a text"))
            await forecasts.request(query("beside it", "a text"))
            busy = True
            await forecasts.request(query("while busy", "a text"))
            for name in ("first", "beside it", "while busy"):
                forecasts.observe(outcome(name, 5))
            await forecasts.request(query("alone", "a text"))
        await forecasts.close()

    asyncio.run(scenario())
    assert [on_loop for _, on_loop in watched.batches] == [False, True, cheap, True]


FORECAST = Forecast((0, 100), (1.0,), "a")


def outcome(name: str, tokens: int, model: str = "m", forecast: Forecast | None = FORECAST) -> Outcome:
    return Outcome(
        query_id=name,
        request_id=name,
        tenant="t",
        key_id="k",
        model=model,
        status=Status.ANSWERED,
        error="",
        prompt_tokens=3,
        completion_tokens=tokens,
        forecast=forecast,
        attempts=(),
        received_at=0.0,
        queue_s=0.0,
        first_token_s=0.1,
        total_s=1.0,
    )


def sample(forecasts: ForecastService, name: str) -> dict[str, float]:
    """One metric's value by who forecast it."""
    (family,) = (each for each in forecasts.collect() if each.name == name)
    return {each.labels["forecaster"]: each.value for each in family.samples}


def test_outcomes_far_from_their_forecasts_raise_the_drift_that_is_exported() -> None:
    forecasts = ForecastService(Forgetful(), HistogramForecaster())
    told = Forecast((0, 100), (1.0,), "forgetful:m")
    for number in range(300):
        forecasts.observe(outcome(f"q{number}", 1 + number % 100, forecast=told))
    assert sample(forecasts, "mico_forecast_drift") == {"forgetful": 0.0}
    assert sample(forecasts, "mico_forecast_p90_coverage")["forgetful"] == pytest.approx(0.9, abs=0.02)
    for number in range(1_000):
        forecasts.observe(outcome(f"r{number}", 900, forecast=told))
    assert sample(forecasts, "mico_forecast_drift") == {"forgetful": 1.0}
    assert sample(forecasts, "mico_forecast_stability_index")["forgetful"] > 0.25


@pytest.mark.parametrize(("reason", "longer"), [("length", 1), ("content_filter", None), ("stop", 0)])
def test_an_answer_that_a_limit_cut_short_would_be_longer(reason: str, longer: int | None) -> None:
    async def scenario() -> None:
        histogram = HistogramForecaster()
        forecasts = ForecastService(histogram, histogram)
        before = await forecasts.request(msgspec.structs.replace(query("q"), sampling=Sampling(max_tokens=5)))
        await forecasts.request(query("unlimited"))
        for name in ("q", "unlimited"):
            ended = outcome(name, 5, forecast=before)
            forecasts.observe(msgspec.structs.replace(ended, ending=Ending(finish_reasons=(reason,))))
            after = histogram.forecast([Features("hi", "m")])[0]
            assert (after == before) is (longer is None)
            assert (after.expected() > before.expected()) is (longer == 1)
            before = after
        await forecasts.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("asked", "tokens", "ends"), [({"n": 2}, 900, ("stop", "stop")), ({"max_tokens": 0}, 0, ("length",))]
)
def test_several_answers_and_none_teach_no_length(
    asked: dict[str, int], tokens: int, ends: tuple[str, ...]
) -> None:
    async def scenario() -> None:
        histogram = HistogramForecaster()
        forecasts = ForecastService(histogram, histogram)
        before = await forecasts.request(msgspec.structs.replace(query("q"), sampling=Sampling(**asked)))
        ended = outcome("q", tokens, forecast=before)
        forecasts.observe(msgspec.structs.replace(ended, ending=Ending(finish_reasons=ends)))
        assert histogram.forecast([Features("hi", "m")])[0] == before
        assert sample(forecasts, "mico_forecast_drift") == {}
        await forecasts.close()

    asyncio.run(scenario())


def test_a_gateway_takes_up_a_new_artifact_and_learns_a_stranger_by_its_outcomes(tmp_path: Path) -> None:
    folder = tmp_path / "served"
    shutil.copytree(SHIPPED / LEXICAL_NAME, folder)

    async def scenario() -> None:
        forecasts = ForecastService(HotReloadForecaster(folder), HistogramForecaster(), reload_every_s=0.01)
        forecasts.start()
        async with asyncio.timeout(60):
            first = await forecasts.request(query("q"))
            assert first.source == f"{LEXICAL_NAME}:unknown-model"
            forecasts.observe(outcome("q", 7, forecast=first))
            while "like" not in (await forecasts.request(query("r"))).source:
                pass  # it is learned beside the forecasts
            card, graph = read_card(folder), (folder / GRAPH_FILE).read_bytes()
            write(folder, graph, replace(card, name="newer"))
            while not (await forecasts.request(query("s"))).source.startswith("newer"):
                pass  # the folder is looked at by time
        await forecasts.close()

    asyncio.run(scenario())


def test_the_drift_from_an_artifact_ends_with_it(tmp_path: Path) -> None:
    folder = tmp_path / "served"
    shutil.copytree(SHIPPED / LEXICAL_NAME, folder)

    async def scenario() -> None:
        forecasts = ForecastService(HotReloadForecaster(folder), HistogramForecaster(), reload_every_s=0.01)
        forecasts.start()
        for number in range(300):
            forecasts.observe(outcome(f"q{number}", 900, forecast=replace(FORECAST, source=LEXICAL_NAME)))
        assert sample(forecasts, "mico_forecast_drift") == {LEXICAL_NAME: 1.0}
        card, graph = read_card(folder), (folder / GRAPH_FILE).read_bytes()
        write(folder, graph, replace(card, trained_on={"updates": []}))
        async with asyncio.timeout(60):
            while sample(forecasts, "mico_forecast_drift"):  # noqa: ASYNC110 - the folder is looked at by time
                await asyncio.sleep(0.01)
        await forecasts.close()

    asyncio.run(scenario())


def test_texts_are_kept_only_where_a_log_is_given(tmp_path: Path) -> None:
    async def scenario(kept: OutcomeLog | None) -> None:
        forecasts = ForecastService(HistogramForecaster(), HistogramForecaster(), outcome_log=kept)
        forecasts.observe(outcome("q", 7, forecast=await forecasts.request(query("q"))))
        await forecasts.close()

    asyncio.run(scenario(None))
    log = OutcomeLog(tmp_path / "outcomes")
    assert log_files(tmp_path / "outcomes") == []
    asyncio.run(scenario(log))
    (file,) = log_files(tmp_path / "outcomes")
    assert '"prompt": "hi"' in file.read_text()


def test_outcomes_that_come_faster_than_they_are_learned_are_not_hoarded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.query.forecasting.MAX_TO_LEARN", 5)
    disk_answers, added = threading.Event(), []

    class Slow(OutcomeLog):
        def add(self, query: Features, tokens: int, *, ended: bool = True) -> None:
            disk_answers.wait(60)
            added.append(tokens)

    async def scenario() -> None:
        forecasts = ForecastService(HistogramForecaster(), HistogramForecaster(), outcome_log=Slow(tmp_path))

        async def answered(tokens: int) -> None:
            await forecasts.request(query(f"q{tokens}"))
            forecasts.observe(outcome(f"q{tokens}", tokens))

        for tokens in range(1, 20):
            await answered(tokens)
        disk_answers.set()
        async with asyncio.timeout(60):
            while len(added) < 5:  # noqa: ASYNC110 - of a thread
                await asyncio.sleep(0.001)
        await forecasts.close()

    asyncio.run(scenario())
    assert added == [1, 2, 3, 4, 5]


def test_what_was_learned_makes_room_to_learn_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.query.forecasting.MAX_TO_LEARN", 1)
    added: list[int] = []

    class Full(OutcomeLog):
        def add(self, query: Features, tokens: int, *, ended: bool = True) -> None:
            added.append(tokens)
            raise OSError("No space left on device")

    async def scenario() -> None:
        forecasts = ForecastService(HistogramForecaster(), HistogramForecaster(), outcome_log=Full(tmp_path))
        async with asyncio.timeout(60):
            for tokens in range(1, 4):
                while tokens not in added:
                    await forecasts.request(query(f"q{tokens}"))
                    forecasts.observe(outcome(f"q{tokens}", tokens))
        await forecasts.close()

    asyncio.run(scenario())
    assert sorted(set(added)) == [1, 2, 3]


def test_prompts_of_megabytes_do_not_wait_to_be_learned(tmp_path: Path) -> None:
    async def scenario() -> None:
        log = OutcomeLog(tmp_path / "outcomes")
        forecasts = ForecastService(HistogramForecaster(), HistogramForecaster(), outcome_log=log)
        for name, text in (("long", "x" * (MAX_LEARNED_CHARS + 1)), ("short", "hello")):
            forecast = await forecasts.request(query(name, text))
            forecasts.observe(outcome(name, 7, forecast=forecast))
        await forecasts.close()

    asyncio.run(scenario())
    (file,) = log_files(tmp_path / "outcomes")
    assert file.read_text().count('"prompt": ') == file.read_text().count('"prompt": "hello"') == 1


def test_queries_that_are_given_up_are_not_forecast() -> None:
    begun, goes_on, forecast = threading.Event(), threading.Event(), list[str]()

    class Slow:
        name = "slow"

        def forecast(self, queries: Sequence[Features]) -> list[Forecast]:
            begun.set()
            assert goes_on.wait(60)
            forecast.extend(each.text for each in queries)
            return [Forecast((0, 100), (1.0,), self.name) for _ in queries]

    async def scenario() -> None:
        forecasts = ForecastService(Slow(), Slow())
        waiting = [forecasts.request(query("first", "first"))]
        while not begun.is_set():  # noqa: ASYNC110 - of a thread
            await asyncio.sleep(0.001)
        waiting += [forecasts.request(query(name, name)) for name in ("gone", "kept")]
        waiting[1].set_exception(TimeoutError())
        goes_on.set()
        await asyncio.gather(*waiting, return_exceptions=True)
        await forecasts.close()
        assert forecast == ["first", "kept"]

    asyncio.run(scenario())


def test_an_interactive_query_waits_for_the_lines_of_two_bunches_at_most() -> None:
    """And the lines are not left behind by any number of interactive queries."""
    begun, goes_on, bunches = threading.Event(), threading.Event(), list[list[str]]()

    class Slow:
        name = "slow"

        def forecast(self, queries: Sequence[Features]) -> list[Forecast]:
            begun.set()
            assert goes_on.wait(60)
            bunches.append([each.text for each in queries])
            return [Forecast((0, 100), (1.0,), self.name) for _ in queries]

    async def scenario() -> None:
        forecasts = ForecastService(Slow(), Slow())
        lines = [msgspec.structs.replace(query(f"l{n}", "line"), lane=Lane.BATCH) for n in range(60)]
        waiting = [forecasts.request(line) for line in lines[:30]]
        waiting += [forecasts.request_ahead(line) for line in lines[30:]]
        while not begun.is_set():  # noqa: ASYNC110 - of a thread
            await asyncio.sleep(0.001)
        waiting += [forecasts.request(query(f"q{n}", "chat")) for n in range(3 * MAX_BATCH)]
        await asyncio.sleep(0)  # the turn of the event loop in which they came is over
        goes_on.set()
        async with asyncio.timeout(60):
            await asyncio.gather(*waiting)
        await forecasts.close()

    asyncio.run(scenario())
    lines = [bunch.count("line") for bunch in bunches]
    chats = [bunch.count("chat") for bunch in bunches]
    assert max(lines) <= MAX_BATCH_LINES and sum(lines) == 60
    assert chats[:5] == [0, MAX_BATCH, MAX_BATCH, MAX_BATCH, 0]
    assert lines[1] > 0


def test_a_variant_is_forecast_by_its_parent() -> None:
    seen: list[Features] = []

    class Watched(Forgetful):
        def forecast(self, queries: Sequence[Features]) -> list[Forecast]:
            seen.extend(queries)
            return super().forecast(queries)

    async def scenario() -> None:
        parents = {"v": "m"}
        forecasts = ForecastService(
            Watched(), HistogramForecaster(), parent_of=lambda model: parents.get(model, "")
        )
        asked = Query("q", "v", "hi", Sampling(), Caller("k", "t"), 0.0, 100.0)
        await forecasts.request(asked)
        await forecasts.request_ahead(msgspec.structs.replace(asked, id="r", model="m"))
        await forecasts.close()

    asyncio.run(scenario())
    assert [(each.model, each.parent) for each in seen] == [("v", "m"), ("m", "")]
