"""Export a query's OpenTelemetry spans, built from its outcome after it has ended.

While the query runs, only the span id of each attempt is sent to the site. Span ids are derived from query
and attempt ids, so gateway and site agree without a message. Imports the extra `otel`; only `app.py` imports
this module, and only where traces are enabled.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b

from msgspec.structs import replace
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, TraceFlags
from opentelemetry.util.types import AttributeValue

from gateway.domain import Query
from gateway.outcome import Attempt, Outcome, Status
from gateway.telemetry.gen_ai import span_attributes

EXPORT_TIMEOUT_S = 5


def exporter(url: str) -> SpanProcessor:
    """Return a processor that sends spans to an OTLP/HTTP collector from its own thread; late ones are
    dropped.
    """
    endpoint = f"{url.rstrip('/')}/v1/traces"
    return BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT_S))


class _PresetIds(IdGenerator):
    """Returns the ids that were set before the span starts."""

    trace_id = 0
    span_id = 0

    def generate_trace_id(self) -> int:
        return self.trace_id

    def generate_span_id(self) -> int:
        return self.span_id


class Traces:
    """Builds and exports the spans of this gateway's queries."""

    def __init__(self, gateway: str, processor: SpanProcessor) -> None:
        self._ids = _PresetIds()
        names = {"service.name": "mico-gateway", "service.instance.id": gateway}
        self._provider = TracerProvider(id_generator=self._ids, resource=Resource.create(names))
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("mico.gateway")
        self._received_at = 0.0

    def inject(self, query: Query, attempt_id: str) -> Query:
        """Return the query with the span of this attempt as its `traceparent`."""
        parent = self._parent(query.traceparent, query.id)
        wanted = self._provider.sampler.should_sample(
            trace.set_span_in_context(NonRecordingSpan(parent)) if query.traceparent else None,
            parent.trace_id,
            "request",
        )
        flags = int(wanted.decision is Decision.RECORD_AND_SAMPLE)
        named = f"00-{parent.trace_id:032x}-{_span_id(attempt_id):016x}-{flags:02x}"
        return replace(query, traceparent=named)

    def observe(self, outcome: Outcome) -> None:
        """Export the spans of a query that ended: request, forecast, and each decision and attempt."""
        within = self._parent(outcome.traceparent, outcome.query_id)
        self._ids.trace_id = within.trace_id
        self._received_at = outcome.received_at
        request = self._span(
            "request",
            within if outcome.traceparent else None,
            (0.0, outcome.total_s),
            span_id=_span_id(outcome.query_id),
            attributes=_attributes(outcome),
            kind=SpanKind.SERVER,
        )
        if outcome.forecast_s is not None:
            source = outcome.forecast.source if outcome.forecast else ""
            self._span(
                "forecast",
                request,
                (0.0, outcome.forecast_s),
                span_id=_span_id(f"{outcome.query_id} forecast"),
                attributes={"mico.forecast.source": source},
            )
        ends = [each.decision.began_s for each in outcome.attempts[1:]]
        for attempt, end_s in zip(outcome.attempts, [*ends, outcome.total_s], strict=True):
            self._attempt(request, attempt, end_s)

    def close(self) -> None:
        """Send the waiting spans; may take EXPORT_TIMEOUT_S."""
        self._provider.shutdown()

    def _attempt(self, request: SpanContext, attempt: Attempt, end_s: float) -> None:
        decision = attempt.decision
        self._span(
            "decide",
            request,
            (decision.began_s, decision.decided_s),
            span_id=_span_id(f"{decision.attempt_id} decide"),
            attributes={
                "mico.policy": decision.policy,
                "mico.reason": decision.reason,
                "mico.site": decision.site,
            },
        )
        self._span(
            "attempt",
            request,
            (decision.decided_s, max(decision.decided_s, end_s)),
            span_id=_span_id(decision.attempt_id),
            attributes={
                "mico.site": decision.site,
                "mico.attempt": decision.attempt_id,
                "mico.ended": attempt.ended,
                "gen_ai.usage.input_tokens": attempt.prompt_tokens,
                "gen_ai.usage.output_tokens": attempt.completion_tokens,
            },
            kind=SpanKind.CLIENT,
        )

    def _span(
        self,
        name: str,
        parent: SpanContext | None,
        when_s: tuple[float, float],
        *,
        span_id: int,
        attributes: Mapping[str, AttributeValue],
        kind: SpanKind = SpanKind.INTERNAL,
    ) -> SpanContext:
        """Export a span that has ended. `when_s` is (begin, end) in seconds since the query was received."""
        self._ids.span_id = span_id
        began_ns, ended_ns = (int((self._received_at + at_s) * 1e9) for at_s in when_s)
        context = trace.set_span_in_context(NonRecordingSpan(parent or trace.INVALID_SPAN_CONTEXT))
        span = self._tracer.start_span(
            name, context=context, kind=kind, attributes=attributes, start_time=began_ns
        )
        span.end(end_time=ended_ns)
        return span.get_span_context()

    def _parent(self, traceparent: str, query_id: str) -> SpanContext:
        """Return the client's span; without one, the root of the query's own trace."""
        if not traceparent:
            trace_id = int.from_bytes(blake2b(query_id.encode(), digest_size=16).digest(), "big")
            return SpanContext(trace_id, _span_id(query_id), is_remote=False)
        _, trace_hex, span_hex, flags = traceparent.split("-")[:4]
        sampled = TraceFlags(int(flags, 16))
        return SpanContext(int(trace_hex, 16), int(span_hex, 16), is_remote=True, trace_flags=sampled)


def _attributes(outcome: Outcome) -> dict[str, AttributeValue]:
    about: dict[str, AttributeValue] = {
        "mico.request_id": outcome.request_id,
        "mico.query_id": outcome.query_id,
        "mico.tenant": outcome.tenant,
        "mico.status": outcome.status.value,
        **span_attributes(outcome),
    }
    if outcome.status is not Status.ANSWERED:
        about["mico.error"] = outcome.error
    if outcome.first_token_s is not None:
        about["mico.first_token_s"] = outcome.first_token_s
    return about


def _span_id(name: str) -> int:
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big")
