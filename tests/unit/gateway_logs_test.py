"""Log lines share writes while a loop runs; none is lost, and a warning flushes them."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from gateway.telemetry import logs
from gateway.telemetry.logs import BufferedHandler, JsonFormatter


class Written(io.StringIO):
    """A stream that counts writes; `gone` makes writes fail, as without a reader."""

    writes = 0
    gone = False

    def write(self, text: str) -> int:
        if self.gone:
            raise BrokenPipeError("nobody reads this")
        self.writes += 1
        return super().write(text)

    @property
    def messages(self) -> list[str]:
        return [json.loads(line)["message"] for line in self.getvalue().splitlines()]


@contextmanager
def logged() -> Iterator[tuple[logging.Logger, Written]]:
    stream = Written()
    gathered = BufferedHandler(stream)
    gathered.setFormatter(JsonFormatter())
    logger = logging.getLogger("a logger of this test")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(gathered)
    try:
        yield logger, stream
    finally:
        logger.removeHandler(gathered)


def test_lines_share_a_write_and_come_soon() -> None:
    async def scenario(logger: logging.Logger, stream: Written) -> None:
        for number in range(10):
            logger.info("%d", number)
        assert stream.writes == 0
        async with asyncio.timeout(60):
            while not stream.writes:  # noqa: ASYNC110 - written by a timer
                await asyncio.sleep(0.001)
        assert stream.messages == [str(number) for number in range(10)]
        assert stream.writes == 1

    with logged() as (logger, stream):
        asyncio.run(scenario(logger, stream))


def test_a_warning_takes_along_what_waits_and_so_does_a_crowd() -> None:
    async def scenario(logger: logging.Logger, stream: Written) -> None:
        logger.info("first")
        logger.warning("second")
        assert stream.messages == ["first", "second"]
        for _ in range(logs.MAX_BUFFERED_LINES):
            logger.info("more")
        assert len(stream.messages) == 2 + logs.MAX_BUFFERED_LINES

    with logged() as (logger, stream):
        asyncio.run(scenario(logger, stream))


def test_without_a_loop_nothing_waits_and_the_end_of_a_process_writes_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logs, "FLUSH_AFTER_S", 3600.0)  # however long the loop takes to end

    async def scenario(logger: logging.Logger) -> None:
        logger.info("left behind")

    with logged() as (logger, stream):
        logger.info("at once")
        assert stream.messages == ["at once"]
        asyncio.run(scenario(logger))
        assert stream.messages == ["at once"]
        for each in logger.handlers:
            each.flush()  # as logging does at exit
        assert stream.messages == ["at once", "left behind"]


def test_a_log_that_nobody_reads_breaks_nothing() -> None:
    with logged() as (logger, stream):
        stream.gone = True
        logger.error("into the void")
        stream.gone = False
        logger.error("heard")
    assert stream.messages == ["heard"]


def test_the_line_of_a_request_takes_one_query_until_it_is_written() -> None:
    async def of_a_request(line: logs.RequestLine) -> None:
        logs.REQUEST_LINE.set(line)
        assert logs.add_request_fields({"site": "a"})
        assert not await asyncio.create_task(add_fields({"site": "b"}))  # of several prompts the second
        assert line.fields == {"site": "a"}

    async def add_fields(fields: dict[str, object]) -> bool:
        return logs.add_request_fields(fields)

    async def scenario() -> None:
        assert not logs.add_request_fields({"site": "of a batch"})
        await asyncio.create_task(of_a_request(logs.RequestLine()))
        written = logs.RequestLine()
        written.is_written = True
        logs.REQUEST_LINE.set(written)
        assert not logs.add_request_fields({"site": "too late"})

    asyncio.run(scenario())
