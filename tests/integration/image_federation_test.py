"""Images through a gateway and sites to servers: who gets them, what they cost; nobody keeps them."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from gateway.domain import Query, Usage
from gateway.errors import NoSite
from gateway.openai.chat_request import read_chat
from gateway.openai.fields import Fields, Problems
from gateway.outcome import Status
from gateway.query.forecasting import ForecastService
from predictor.histogram import HistogramForecaster
from predictor.outcome_log import OutcomeLog
from site_engine import remote_site
from tests.support.fakes.federation import FlatForecaster, until
from tests.support.openai_server import Mood
from tests.support.remote_fleet import Fleet, run
from tests.support.server_abilities import BLUE, IMAGE_TOKENS, RED, data_url, png

CONTEXT = 1000
SEES = {"features": ("vision",)}
SEEN = "What? 30x20 #ff0000"


@pytest.fixture(autouse=True)
def _quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("POLL_EVERY_S", "LIST_EVERY_S", "BACKOFF_FIRST_S"):
        monkeypatch.setattr(remote_site, name, 0.02)


def showing(fleet: Fleet, *urls: str, **sampling: Any) -> Query:
    """Return a query that asks what is in images."""
    shown = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    content = [{"type": "text", "text": "What? "}, *shown]
    problems = Problems()
    request = read_chat(Fields({"model": "m", "messages": [{"role": "user", "content": content}]}, problems))
    problems.raise_any()
    return replace(fleet.here.query(**sampling), prompt=request.prompts[0])


RED_ONE = data_url(png(30, 20, RED))


def test_a_server_sees_the_bytes_that_the_client_sent() -> None:
    async def scenario(fleet: Fleet) -> None:
        text, usage = await fleet.ask(showing(fleet, RED_ONE, max_tokens=len(SEEN)))
        assert text == SEEN
        assert usage == Usage(7 + IMAGE_TOKENS, len(SEEN))
        both = SEEN + "2x2 #0000ff"
        text, usage = await fleet.ask(
            showing(fleet, RED_ONE, data_url(png(2, 2, BLUE)), max_tokens=len(both))
        )
        assert text == both
        assert usage.prompt_tokens == 7 + 2 * IMAGE_TOKENS
        assert fleet.here.outcomes[-1].prompt_tokens == 7 + 2 * IMAGE_TOKENS
        await fleet.at_rest()

    run(scenario, "a", settings={"a": SEES}, context=CONTEXT)


def test_only_sites_that_see_get_images() -> None:
    async def scenario(fleet: Fleet) -> None:
        model = fleet.here.gateway.directory.served["m"]
        assert "vision" in model.features
        await asyncio.gather(*(fleet.ask(showing(fleet, RED_ONE)) for _ in range(12)))
        assert not fleet.servers["blind"].asked
        assert len(fleet.servers["sees"].asked) == 12
        assert {each.attempts[0].decision.excluded["blind"] for each in fleet.here.outcomes} == {
            "lacks vision"
        }
        await fleet.servers["sees"].die()
        await until(lambda: fleet.ready() == {"blind"}, "the site that sees is gone")
        with pytest.raises(NoSite, match="lacks vision"):
            await fleet.ask(showing(fleet, RED_ONE))
        text, _ = await fleet.ask(fleet.here.query(max_tokens=3))
        assert text == "Say"

    run(scenario, "blind", "sees", settings={"sees": SEES}, context=CONTEXT)


def test_an_address_goes_where_the_server_may_fetch_it() -> None:
    async def scenario(fleet: Fleet) -> None:
        address = "https://example.org/cat.png"
        for _ in range(4):
            text, _ = await fleet.ask(showing(fleet, address, max_tokens=60))
            assert text.startswith(f"What? fetched {address}")
        assert not fleet.servers["inline"].asked

    fetches = {**SEES, "allow_image_urls": True}
    run(scenario, "inline", "fetches", settings={"inline": SEES, "fetches": fetches})


@pytest.mark.parametrize("mood", [Mood.FAILING, Mood.FULL, Mood.GARBAGE])
def test_another_site_that_sees_takes_over_before_the_first_word(mood: Mood) -> None:
    async def scenario(fleet: Fleet) -> None:
        fleet.servers["a"].mood = mood
        for _ in range(4):
            text, _ = await fleet.ask(showing(fleet, RED_ONE, max_tokens=len(SEEN)))
            assert text == SEEN
        assert not fleet.servers["blind"].asked
        await fleet.at_rest()

    run(scenario, "a", "b", "blind", settings={"a": SEES, "b": SEES}, context=CONTEXT)


def test_another_site_that_sees_goes_on_after_the_text() -> None:
    async def scenario(fleet: Fleet) -> None:
        fleet.servers["a"].waits_halfway = True
        fleet.hold_back("b", "blind")
        asking = asyncio.create_task(fleet.ask(showing(fleet, RED_ONE, max_tokens=len(SEEN))))
        await until(lambda: any(each.opened for each in fleet.here.gateway.live_queries.values()))
        await fleet.servers["a"].until(lambda: fleet.servers["a"].asked)
        fleet.hold_back()
        await fleet.servers["a"].die()
        text, usage = await asking
        assert (text, usage.completion_tokens) == (SEEN, len(SEEN))
        (outcome,) = fleet.here.outcomes
        assert [each.decision.site for each in outcome.attempts] == ["a", "b"]
        assert outcome.status is Status.ANSWERED
        await fleet.at_rest()

    run(scenario, "a", "b", "blind", settings={"a": SEES, "b": SEES}, owner="vllm", context=CONTEXT)


def test_nothing_keeps_an_image(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    secret = RED_ONE.partition(",")[2][:60]
    caplog.set_level(logging.DEBUG)

    async def scenario(fleet: Fleet) -> None:
        log = OutcomeLog(tmp_path)
        fallback = HistogramForecaster()
        forecasts = ForecastService(FlatForecaster(), fallback, outcome_log=log)
        record = fleet.here.gateway.record
        fleet.here.gateway.forecasts = forecasts
        fleet.here.gateway.record = lambda outcome: (record(outcome), forecasts.observe(outcome))[0]
        await fleet.ask(showing(fleet, RED_ONE))
        await fleet.at_rest()
        assert secret not in repr(fleet.here.outcomes)
        await forecasts.close()

    run(scenario, "a", settings={"a": SEES}, context=CONTEXT, ends="stop")  # what ends by itself is learned
    written = b"".join(each.read_bytes() for each in tmp_path.rglob("*") if each.is_file())
    assert b"What?" in written
    assert secret.encode() not in written
    assert secret not in caplog.text
