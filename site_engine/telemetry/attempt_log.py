"""Log a line for each choice that ended at this site, and record spans where a collector is configured."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from site_engine.core.request import Output
from site_engine.errors import ConfigError
from site_engine.messages import Assign, OnFinish

log = logging.getLogger(__name__)


@asynccontextmanager
async def attempt_log(site: str, otlp_url: str) -> AsyncIterator[OnFinish]:
    """Yield a callback for the last output of each choice.

    Import nothing of OpenTelemetry unless `otlp_url` names a collector. Raises ConfigError if it is missing.
    """
    if not otlp_url:
        yield log_finish
        return
    try:
        from site_engine.telemetry.traces import Traces, exporter
    except ModuleNotFoundError as exc:
        raise ConfigError("otlp_url needs OpenTelemetry, of the extra otel") from exc
    traces = Traces(site, exporter(otlp_url))

    def log_and_trace(assign: Assign, index: int, output: Output) -> None:
        log_finish(assign, index, output)
        traces.record(assign, index, output)

    try:
        yield log_and_trace
    finally:
        await asyncio.to_thread(traces.close)


def log_finish(assign: Assign, index: int, output: Output) -> None:
    if not log.isEnabledFor(logging.INFO):
        return
    extra = {
        "request_id": assign.request_id,
        "query_id": assign.query_id,
        "attempt_id": assign.attempt_id,
        "choice": index,
        "finish": output.finish.name.lower() if output.finish else "",
        "completion_tokens": output.completion_tokens,
    }
    log.info("attempt %s ended", assign.attempt_id, extra=extra)
