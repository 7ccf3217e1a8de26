"""A batch that asks for a route is answered by one model, by the room of that model's sites."""

from __future__ import annotations

import asyncio

from gateway.routing.model_routes import ModelRoute, Target, When
from tests.support.batch_replica import chat_line, jsonl, replica


def test_a_batch_of_a_route_is_one_models_and_its_lines_have_the_asked_name(url: str) -> None:
    async def main() -> None:
        async with replica(url) as here:
            targets = (Target("nowhere"), Target("m", when=When.UNAVAILABLE))
            routes = {"name": ModelRoute("name", targets)}
            here.scene.gateway.routes = lambda: routes
            content = jsonl(*(chat_line(number, model="name") for number in range(12)))
            done = await here.ended(await here.submit(content))
            assert (done.request_counts.completed, done.model) == (12, "name")
            bodies = [line["response"]["body"] for line in await here.lines(done.output_file_id)]
            assert {body["model"] for body in bodies} == {"name"}
            recorded = {(outcome.model, outcome.asked_model) for outcome in here.scene.outcomes}
            assert recorded == {("m", "name")}
            reasons = [outcome.attempts[0].decision.reason for outcome in here.scene.outcomes]
            assert all(reason.startswith("assigned jointly") for reason in reasons)

    asyncio.run(main())


def test_the_lines_of_a_batch_go_to_one_target(url: str) -> None:
    async def main() -> None:
        async with replica(url) as here:
            other = await here.scene.site("other", model="n")
            serving = asyncio.create_task(here.serve(other))
            routes = {"name": ModelRoute("name", (Target("m"), Target("n")))}
            here.scene.gateway.routes = lambda: routes
            content = jsonl(*(chat_line(number, model="name") for number in range(12)))
            done = await here.ended(await here.submit(content))
            serving.cancel()
            assert done.request_counts.completed == 12
            assert len({outcome.model for outcome in here.scene.outcomes}) == 1

    asyncio.run(main())
