"""What an answer took is freed at once, however it ended: a cycle would keep its text for minutes."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import Iterator

import pytest

from gateway.errors import MicoError
from gateway.federation.attempt import LiveAttempt
from gateway.query.answer import QueryRun
from gateway.query.state import QueryState
from gateway.routing.model_routes import ModelRoute, Target, When
from tests.integration.quotas_answer_test import quotas_of
from tests.support.answers import collect, run, start_answer
from tests.support.fakes.federation import Scene, until
from wire import federation_pb2 as pb

KINDS = (LiveAttempt, QueryRun, QueryState)


@pytest.fixture(autouse=True)
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def left() -> Counter[str]:
    return Counter(type(each).__name__ for each in gc.get_objects() if isinstance(each, KINDS))


async def finish(here: Scene) -> None:
    asking = asyncio.create_task(collect(here, here.query()))
    await here.sites[0].finish(await here.sites[0].assigned(), "x", 1)
    await asking


async def leave(here: Scene) -> None:
    """Begin an answer, and leave in the middle of it without reading what came last."""
    asking, pieces = start_answer(here, here.query())
    assign = await here.sites[0].assigned()
    await here.sites[0].step(assign, "x", 1)
    await until(lambda: pieces, "the first piece")
    await here.sites[0].step(assign, "y", 2)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert (await here.sites[0].next()).WhichOneof("body") == "cancel"
    await here.sites[0].step(assign, "", 2, finish=pb.Delta.CANCELLED)


async def fail(here: Scene) -> None:
    asking = asyncio.create_task(collect(here, here.query()))
    assign = await here.sites[0].assigned()
    await here.sites[0].step(assign, "x", 1)
    await here.sites[0].step(assign, "", 1, finish=pb.Delta.FAILED, error="no")
    await asyncio.wait([asking])
    assert isinstance(asking.exception(), MicoError)
    assert (await here.sites[0].next()).WhichOneof("body") == "cancel"


async def fall_back(here: Scene) -> None:
    """Fail at the first model of a route, and be answered by the second, or by none."""
    for answers in (True, False):
        asking = asyncio.create_task(collect(here, here.query(model="name")))
        for site, breaks in zip(here.sites, (True, not answers), strict=True):
            assign = await site.assigned()
            if breaks:
                await site.step(assign, "", 0, finish=pb.Delta.FAILED, error="no")
                assert (await site.next()).WhichOneof("body") == "cancel"
            else:
                await site.finish(assign, "x", 1)
        await asyncio.wait([asking])
        assert isinstance(asking.exception(), MicoError) is not answers


@pytest.mark.parametrize("end", [finish, leave, fail, fall_back])
def test_nothing_is_left_of_an_answer(end: object) -> None:
    async def scenario(here: Scene) -> None:
        await here.site("a")
        if end is fall_back:
            await here.site("b", model="n")
        assert callable(end)
        for _ in range(3):
            await end(here)
        await here.gateway.wait_settled()
        await until(here.nothing_is_left, "all counters at zero")
        await until(lambda: not left(), f"all freed: {left()}")

    routes = {"name": ModelRoute("name", (Target("m"), Target("n", when=When.UNAVAILABLE)))}
    run(scenario, quotas=quotas_of(tokens_per_min=100_000), routes=lambda: routes)
