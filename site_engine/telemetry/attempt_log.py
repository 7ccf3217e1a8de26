"""What is told of each choice that ended at this site: a line of the log, and spans where they are wanted."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from site_engine.config import SiteConfig
from site_engine.core.request import Output
from site_engine.errors import ConfigError
from site_engine.federation.attempts import Tell
from site_engine.messages import Assign

if TYPE_CHECKING:
    from site_engine.telemetry.traces import Traces

log = logging.getLogger(__name__)


@asynccontextmanager
async def telling(config: SiteConfig) -> AsyncIterator[Tell]:
    """Imports nothing of OpenTelemetry unless a collector is named. Raises ConfigError."""
    if not config.otlp_url:
        yield write_down
        return
    traces = _traces(config)

    def tell(assign: Assign, index: int, output: Output) -> None:
        write_down(assign, index, output)
        traces.tell(assign, index, output)

    try:
        yield tell
    finally:
        await asyncio.to_thread(traces.close)


def write_down(assign: Assign, index: int, output: Output) -> None:
    if not log.isEnabledFor(logging.INFO):
        return
    told = {
        "request_id": assign.request_id,
        "query_id": assign.query_id,
        "attempt_id": assign.attempt_id,
        "choice": index,
        "finish": output.finish.name.lower() if output.finish else "",
        "completion_tokens": output.completion_tokens,
    }
    log.info("attempt %s ended", assign.attempt_id, extra=told)


def _traces(config: SiteConfig) -> Traces:
    try:
        from site_engine.telemetry.traces import Traces, exporter
    except ModuleNotFoundError as exc:
        raise ConfigError("otlp_url needs OpenTelemetry: pip install 'mico[otel]'") from exc
    return Traces(config.site, exporter(config.otlp_url))
