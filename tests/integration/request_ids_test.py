"""The id that a client knows is in every line that the gateway and the site write of its request."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from gateway.telemetry.logs import JsonFormatter
from site_engine.app import serve
from site_engine.config import SiteConfig
from site_engine.telemetry.logs import JsonLines
from tests.support.answers import backend_of
from tests.support.fakes.edge import Edge, Script, chat_body, on_loopback
from tests.support.fakes.federation import TOKEN, Scene, scene, until
from tests.support.site_fakes import fake_loaded


class Lines(logging.Handler):
    def __init__(self, formatter: logging.Formatter) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self.lines: list[dict[str, object]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(json.loads(self.format(record)))

    def about_queries(self) -> list[dict[str, object]]:
        """Return all lines but those of links and of the process."""
        elsewhere = (
            "gateway.federation.server",
            "gateway.federation.link",
            "site_engine.app",
            "site_engine.shutdown",
            "site_engine.federation.dial",
            "site_engine.federation.link",
        )
        return [line for line in self.lines if line["logger"] not in elsewhere]


@contextmanager
def heard(package: str, formatter: logging.Formatter) -> Iterator[Lines]:
    logger, lines = logging.getLogger(package), Lines(formatter)
    before = logger.level
    logger.addHandler(lines)
    logger.setLevel(logging.DEBUG)
    try:
        yield lines
    finally:
        logger.removeHandler(lines)
        logger.setLevel(before)


async def ask(here: Scene, edge: Edge) -> None:
    await until(lambda: any(site.state == "ready" for site in here.gateway.directory.sites), "ready")
    body = chat_body(model="m", max_tokens=4, something_unknown=1)
    for fields in ({}, {"stream": True}):
        await edge.post("/v1/chat/completions", body | fields, x_request_id="mine")
    await edge.post("/v1/chat/completions", chat_body(model="none"), x_request_id="mine")
    await until(lambda: len(here.outcomes) == 3, "three outcomes")


def test_every_line_about_a_request_names_it() -> None:
    async def main() -> None:
        async with asyncio.timeout(60), scene() as here:
            config = SiteConfig(site="alpha", model="m", gateways=(here.address,), token=TOKEN)
            loaded = fake_loaded(name="m")
            site = asyncio.create_task(serve(config, lambda _: loaded))
            async with on_loopback(Script(), backend_of(here)) as (edge, _):
                await ask(here, edge)
            site.cancel()
            await asyncio.gather(site, return_exceptions=True)

    with heard("gateway", JsonFormatter()) as gateway, heard("site_engine", JsonLines("alpha")) as site:
        asyncio.run(main())
    said = gateway.about_queries()
    assert {line["logger"] for line in said} >= {
        "gateway.http.exchange",
        "gateway.http.generation",
    }
    assert [line for line in said if line.get("request_id") != "mine"] == []
    requests = [line for line in said if line["logger"] == "gateway.http.exchange"]
    assert [(line["status"], line["outcome"]) for line in requests] == [
        (200, "answered"),
        (200, "answered"),
        (404, "refused"),
    ]
    assert [line["completion_tokens"] for line in requests] == [4, 4, 0]
    ended = [line for line in site.about_queries() if line["logger"] == "site_engine.telemetry.attempt_log"]
    assert [line["request_id"] for line in ended] == ["mine", "mine"]
    assert [line["completion_tokens"] for line in ended] == [4, 4]
