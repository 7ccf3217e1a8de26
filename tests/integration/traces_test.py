"""One trace from the client's header through the gateway, over a real link, into a site's queue and back."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import site_engine.telemetry.traces
from gateway.ending import Ending
from gateway.query.answer import answer
from gateway.telemetry.gen_ai import GenAiMetrics, span_attributes
from gateway.telemetry.traces import Traces
from site_engine.app import serve
from site_engine.config import SiteConfig
from site_engine.core.request import Output, Timings
from tests.support.ended_queries import ANSWERED
from tests.support.fakes.federation import TOKEN, Scene, scene, until
from tests.support.site_fakes import FakeEngine, fake_loaded

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class TimedEngine(FakeEngine):
    """An engine that reports how long each part of an answer took."""

    def step(self) -> list[Output]:
        timings = Timings(0.25, 0.5, 1.0, 3, 0)
        return [each._replace(timings=timings) if each.finish else each for each in super().step()]


class Spans:
    def __init__(self, exported: InMemorySpanExporter) -> None:
        self._exported = exported

    @property
    def all(self) -> Sequence[ReadableSpan]:
        return self._exported.get_finished_spans()

    def one(self, name: str) -> ReadableSpan:
        (found,) = [span for span in self.all if span.name == name]
        return found

    def parent(self, name: str) -> int:
        parent = self.one(name).parent
        assert parent is not None
        return parent.span_id

    def seconds(self, name: str) -> float:
        span = self.one(name)
        assert span.start_time is not None and span.end_time is not None
        return (span.end_time - span.start_time) / 1e9


async def traced(
    here: Scene, monkeypatch: pytest.MonkeyPatch, traceparent: str, engine: FakeEngine | None = None
) -> Spans:
    """Ask one query of a gateway and a site that both export to memory."""
    exported = InMemorySpanExporter()
    traces = Traces("east", SimpleSpanProcessor(exported))
    here.gateway.trace_query = traces.inject
    monkeypatch.setattr(site_engine.telemetry.traces, "exporter", lambda url: SimpleSpanProcessor(exported))
    loaded = fake_loaded(engine or TimedEngine(), "m")
    config = SiteConfig(
        site="alpha",
        model="m",
        gateways=(here.address,),
        token=TOKEN,
        otlp_url="http://collector.invalid:4318",
    )
    site = asyncio.create_task(serve(config, lambda _: loaded))
    try:
        await until(lambda: any(each.state == "ready" for each in here.gateway.directory.sites), "ready")
        query = replace(here.query(max_tokens=4), request_id="mine", traceparent=traceparent)
        async for _ in answer(here.gateway, query):
            pass
        await until(lambda: here.outcomes, "the outcome")
        traces.observe(here.outcomes[0])
    finally:
        site.cancel()
        await asyncio.gather(site, return_exceptions=True)
        traces.close()
    return Spans(exported)


def run(scenario: Any) -> None:
    async def main() -> None:
        async with asyncio.timeout(60), scene() as here:
            await scenario(here)

    asyncio.run(main())


def test_a_client_trace_goes_through_to_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(here: Scene) -> None:
        spans = await traced(here, monkeypatch, f"00-{TRACE}-{SPAN}-01")
        names = {"request", "forecast", "decide", "attempt", "site", "queue", "prefill", "decode"}
        assert {span.name for span in spans.all} == names
        assert {f"{span.context.trace_id:032x}" for span in spans.all} == {TRACE}
        assert len({span.context.span_id for span in spans.all}) == len(names)
        assert spans.parent("request") == int(SPAN, 16)
        for name in ("forecast", "decide", "attempt"):
            assert spans.parent(name) == spans.one("request").context.span_id
        assert spans.parent("site") == spans.one("attempt").context.span_id
        for name, lasted_s in (("queue", 0.25), ("prefill", 0.5), ("decode", 1.0), ("site", 1.75)):
            assert spans.seconds(name) == pytest.approx(lasted_s, abs=1e-6)
            assert name == "site" or spans.parent(name) == spans.one("site").context.span_id
        request = spans.one("request").attributes or {}
        assert request["mico.request_id"] == "mine"
        assert request["mico.status"] == "answered"
        assert {name: value for name, value in request.items() if "gen_ai" in name} == {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "mico",
            "gen_ai.request.model": "m",
            "gen_ai.response.model": "m",
            "gen_ai.response.finish_reasons": ("length",),
            "gen_ai.response.time_to_first_chunk": request["mico.first_token_s"],
            "gen_ai.usage.input_tokens": len("user: Say something.\n"),
            "gen_ai.usage.output_tokens": 4,
            "gen_ai.usage.cache_read.input_tokens": 3,
        }
        assert (spans.one("decode").attributes or {})["gen_ai.usage.output_tokens"] == 4
        assert (spans.one("site").attributes or {})["mico.request_id"] == "mine"
        assert spans.seconds("forecast") <= spans.seconds("request")

    run(scenario)


def test_without_a_client_trace_a_query_is_a_trace_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(here: Scene) -> None:
        spans = await traced(here, monkeypatch, "")
        assert len(spans.all) == 8
        assert len({span.context.trace_id for span in spans.all}) == 1
        assert spans.one("request").parent is None
        assert spans.parent("site") == spans.one("attempt").context.span_id

    run(scenario)


def test_what_the_client_does_not_sample_is_not_traced_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(here: Scene) -> None:
        assert (await traced(here, monkeypatch, f"00-{TRACE}-{SPAN}-00")).all == ()

    run(scenario)


def test_nothing_is_imported_where_no_collector_is_named() -> None:
    program = (
        "import sys, gateway.app, site_engine.app, site_engine.remote_site\n"
        "sys.exit(any(name.startswith('opentelemetry') for name in sys.modules))"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_names_of_generative_ai_are_those_of_the_conventions() -> None:
    from opentelemetry.semconv._incubating.attributes import gen_ai_attributes as known
    from opentelemetry.semconv._incubating.metrics import gen_ai_metrics
    from prometheus_client import CollectorRegistry

    answered = replace(
        ANSWERED,
        ending=Ending("chat", ("stop", "tool_calls"), 1, 2, "Overloaded"),
    )
    names = set(span_attributes(answered)) - {"error.type"}
    assert len(names) == 10
    assert names <= {value for name, value in vars(known).items() if name.startswith("GEN_AI_")}
    registry = CollectorRegistry()
    GenAiMetrics(registry)
    official = {value for name, value in vars(gen_ai_metrics).items() if name.startswith("GEN_AI_")}
    exported = {family.name.removesuffix("_seconds") for family in registry.collect()}
    assert len(exported) == 4
    assert exported <= {name.replace(".", "_") for name in official}
