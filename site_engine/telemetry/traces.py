"""Record spans of an attempt that has ended, from the engine's times: queue, prefill, decode.

Needs the extra `otel`: only `attempt_log.py` imports this, and only if a collector is configured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from site_engine.core.request import Output
from site_engine.messages import Assign

EXPORT_TIMEOUT_S = 5


def exporter(url: str) -> SpanProcessor:
    """Export to a collector of OTLP over HTTP, from a thread of its own; drop spans not taken in time."""
    endpoint = f"{url.rstrip('/')}/v1/traces"
    return BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT_S))


class Traces:
    def __init__(
        self, site: str, processor: SpanProcessor, unix_time_ns: Callable[[], int] = time.time_ns
    ) -> None:
        names = {"service.name": "mico-site", "service.instance.id": site}
        self._provider = TracerProvider(resource=Resource.create(names))
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("mico.site")
        self._unix_time_ns = unix_time_ns

    def record(self, assign: Assign, index: int, output: Output) -> None:
        """Record the spans of a choice that has ended; without times of the engine there are none."""
        timings = output.timings
        if timings is None or not assign.traceparent:
            return
        parent = TraceContextTextMapPropagator().extract({"traceparent": assign.traceparent})
        finish = output.finish.name.lower() if output.finish else ""
        attributes: dict[str, AttributeValue] = {
            "mico.request_id": assign.request_id,
            "mico.attempt": assign.attempt_id,
            "mico.choice": index,
            "mico.finish": finish,
        }
        ended_ns = self._unix_time_ns()
        first_token_ns = ended_ns - int(timings.decode_s * 1e9)
        scheduled_ns = first_token_ns - int(timings.prefill_s * 1e9)
        admitted_ns = scheduled_ns - int(timings.queued_s * 1e9)
        whole = self._tracer.start_span(
            "site", context=parent, kind=SpanKind.SERVER, attributes=attributes, start_time=admitted_ns
        )
        within = trace.set_span_in_context(whole)
        cached: dict[str, AttributeValue] = {"mico.cached_prompt_tokens": timings.cached_prompt_tokens}
        written: dict[str, AttributeValue] = {
            "gen_ai.usage.output_tokens": output.completion_tokens,
            "mico.preemptions": timings.preemptions,
        }
        self._span("queue", within, admitted_ns, scheduled_ns, {})
        self._span("prefill", within, scheduled_ns, first_token_ns, cached)
        self._span("decode", within, first_token_ns, ended_ns, written)
        whole.end(end_time=ended_ns)

    def close(self) -> None:
        """Send waiting spans; may take EXPORT_TIMEOUT_S."""
        self._provider.shutdown()

    def _span(
        self,
        name: str,
        within: Context,
        began_ns: int,
        ended_ns: int,
        attributes: Mapping[str, AttributeValue],
    ) -> None:
        span = self._tracer.start_span(name, context=within, attributes=attributes, start_time=began_ns)
        span.end(end_time=ended_ns)
