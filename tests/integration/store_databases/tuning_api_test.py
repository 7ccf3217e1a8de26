"""Fine-tuning by OpenAI's SDK: files, jobs, events, checkpoints, the tuned model, and what is refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any
from urllib.parse import quote

import openai
import pytest
from openai.types.fine_tuning import FineTuningJob

from gateway.domain import Caller
from gateway.http import fine_tuning
from gateway.routing.model_routes import ModelRoute, Target
from gateway.store.queries import OperatorReads, TotalBy
from gateway.tuning import ledger
from gateway.tuning.values import TuningLimits
from tests.support import batch_replica
from tests.support.batch_replica import Replica, replica
from tests.support.fakes.edge import error_of
from tests.support.training_site import TRAINS, Run, next_run, stopped
from tests.support.tuning_jobs import JOBS, create, reached, recorded, rows, upload
from wire import federation_pb2 as pb

LIMITS = TuningLimits(lost_s=60.0)


TOOLS = [{"type": "function", "function": {"name": "f"}}]
"""The tuned model can call none: whose it is not must not learn so."""


def play(url: str, scenario: Callable[[Replica], Coroutine[Any, Any, None]], **settings: Any) -> None:
    async def main() -> None:
        settings.setdefault("trains", TRAINS)
        async with replica(url, sites=("a",), tuning_limits=LIMITS, **settings) as here:
            await scenario(here)

    asyncio.run(main())


def test_a_job_from_the_file_to_the_tuned_models_answer(url: str) -> None:
    async def scenario(here: Replica) -> None:
        tuning = here.sdk().fine_tuning
        job = await create(
            here,
            suffix="support",
            seed=7,
            metadata={"for": "test"},
            method={
                "type": "supervised",
                "supervised": {"hyperparameters": {"n_epochs": 3, "batch_size": "auto"}},
            },
        )
        assert (job.object, job.status, job.seed) == ("fine_tuning.job", "validating_files", 7)
        assert (job.hyperparameters.n_epochs, job.hyperparameters.batch_size) == (3, 16)
        run = await next_run(here)
        order = run.order
        assert (order.model, order.tenant, order.epochs, order.batch_size) == ("m", "tenant-1", 3, 16)
        assert (order.learning_rate, order.rank, order.target, order.seed) == (2e-4, 16, "all-linear", 7)
        assert await run.fetch(order.data) == rows()
        assert await run.fetch(order.data, 100) == rows()[100:]
        await run.report(2)
        await recorded(here, job.id, 2)
        assert (await tuning.jobs.retrieve(job.id)).status == "running"
        (listed,) = (await here.raw("GET", "/admin/api/fine_tuning", "boss")).json()["data"]
        assert (listed["id"], listed["tenant"], listed["mico"]["step"]) == (job.id, "tenant-1", 2)
        assert listed["losses"] == [[1, 1.0, None], [2, 0.5, None]]
        assert (await here.raw("GET", "/admin/api/fine_tuning", "one")).status_code == 403
        await run.succeed()
        done = await reached(here, job.id, "succeeded")
        FineTuningJob.model_validate_json((await here.raw("GET", f"{JOBS}/{job.id}")).content, strict=True)
        assert done.fine_tuned_model == f"ft:m:tenant-1:support:{job.id[6:14]}"
        assert (done.trained_tokens, done.finished_at is not None, done.error) == (600, True, None)
        events = [each async for each in tuning.jobs.list_events(job.id, limit=2)]
        metrics = [each.data for each in events if each.type == "metrics"]
        assert [each["step"] for each in metrics] == [6, 5, 4, 3, 2, 1]  # type: ignore[index]
        assert events[-1].message.startswith("The job was created")
        (checkpoint,) = (await tuning.jobs.checkpoints.list(job.id)).data
        assert checkpoint.fine_tuned_model_checkpoint == f"{done.fine_tuned_model}:ckpt-step-3"
        assert (checkpoint.step_number, checkpoint.metrics.train_loss) == (3, pytest.approx(1 / 3))
        results = await here.sdk().files.content(done.result_files[0])
        assert results.text.splitlines()[:2] == [
            "step,train_loss,train_mean_token_accuracy,valid_loss",
            "1,1.0,0.5,",
        ]
        await stopped(here, run, snapshot=False)  # the end is acknowledged
        model = str(done.fine_tuned_model)
        answer = await here.sdk().chat.completions.create(
            model=model, messages=[{"role": "user", "content": "hello"}]
        )
        assert answer.choices[0].message.content == "re: hello"
        assert model in [each.id async for each in here.sdk().models.list()]
        assert (await here.sdk().models.delete(model)).deleted
        with pytest.raises(openai.NotFoundError):
            await here.sdk().models.delete(model)
        site_order = await removal(here)
        assert (site_order.kind, site_order.model) == ("remove", model)

    play(url, scenario)


@pytest.mark.parametrize("tenant", ["a//b", "a%2Fb", "a/", "ä?#"])
def test_a_tuned_model_is_found_and_deleted_whatever_its_tenants_name(
    url: str, monkeypatch: pytest.MonkeyPatch, tenant: str
) -> None:
    """Two slashes in a row were taken for one, so that nobody could delete the model."""
    caller = Caller("key-x", tenant)
    monkeypatch.setitem(batch_replica.CALLERS, "x", caller)
    monkeypatch.setitem(batch_replica.CALLERS_BY_ID, "key-x", caller)

    async def scenario(here: Replica) -> None:
        job = await create(here, key="x")
        await (await next_run(here)).succeed()
        name = str((await reached(here, job.id, "succeeded", key="x")).fine_tuned_model)
        path = f"/v1/models/{quote(name, safe='')}"
        assert (await here.raw("GET", path, "x")).json()["id"] == name
        gone = await here.raw("DELETE", path, "x")
        assert (gone.status_code, gone.json()["id"]) == (200, name)

    play(url, scenario)


async def removal(here: Replica) -> pb.ModelOrder:
    async with asyncio.timeout(60):
        while True:
            site, message = await here.orders.get()
            if message.WhichOneof("body") == "order" and message.order.kind == "remove":
                await site.send(models=pb.Models(models=[site.served_model]))
                await site.send(ordered=pb.Ordered(order_id=message.order.order_id))
                return message.order


def test_another_tenant_sees_nothing_of_a_job_or_its_model(url: str) -> None:
    async def scenario(here: Replica) -> None:
        job = await create(here)
        run = await next_run(here)
        await run.succeed()
        model = (await reached(here, job.id, "succeeded")).fine_tuned_model
        for path in ("", "/events", "/checkpoints", "/events?stream=true"):
            error_of(await here.raw("GET", f"{JOBS}/{job.id}{path}", "two"), 404)
            error_of(await here.raw("GET", f"{JOBS}/{job.id}{path}", "nobody"), 401)
        for verb in ("cancel", "pause", "resume"):
            error_of(await here.raw("POST", f"{JOBS}/{job.id}/{verb}", "two"), 404)
        assert (await here.raw("GET", JOBS, "two")).json()["data"] == []
        chat = {"model": model, "messages": [{"role": "user", "content": "hello"}], "tools": TOOLS}
        error = error_of(await here.raw("POST", "/v1/chat/completions", "two", json=chat), 404)
        assert "does not exist; served here: m" in error["message"] and "ft:" not in error["message"][60:]
        unknown = chat | {"model": "ft:nothing"}
        other = error_of(await here.raw("POST", "/v1/chat/completions", "two", json=unknown), 404)
        assert other["code"] == error["code"]
        error_of(await here.raw("DELETE", f"/v1/models/{model}", "two"), 404)
        error_of(await here.raw("GET", f"/v1/models/{model}", "two"), 404)
        assert [each["id"] for each in (await here.raw("GET", "/v1/models", "two")).json()["data"]] == ["m"]
        body = {"model": "m", "training_file": job.training_file}
        assert error_of(await here.raw("POST", JOBS, "two", json=body), 400)["param"] == "training_file"

    play(url, scenario)


def test_a_key_that_may_use_the_base_may_use_what_its_tenant_trained_from_it(url: str) -> None:
    """It could train a model, and not ask it. No other key of the tenant may, and no other tenant."""

    async def scenario(here: Replica) -> None:
        job = await create(here, key="one-base")
        await (await next_run(here)).succeed()
        model = str((await reached(here, job.id, "succeeded", key="one-base")).fine_tuned_model)
        chat = {"model": model, "messages": [{"role": "user", "content": "hello"}]}
        answers = {
            key: (await here.raw("POST", "/v1/chat/completions", key, json=chat)).status_code
            for key in ("one", "one-base", "one-other", "two", "two-base", "boss")
        }
        assert answers == {
            "one": 200,
            "one-base": 200,
            "one-other": 403,
            "two": 404,
            "two-base": 404,
            "boss": 404,
        }
        for key, listed in (("one-base", {"m", model}), ("one-other", set()), ("two-base", {"m"})):
            found = (await here.raw("GET", "/v1/models", key)).json()["data"]
            assert {each["id"] for each in found} == listed
            shown = await here.raw("GET", f"/v1/models/{model}", key)
            assert shown.status_code == (200 if model in listed else 404)

    play(url, scenario)


def test_a_key_that_may_not_use_a_tuned_model_can_not_delete_it(url: str) -> None:
    async def scenario(here: Replica) -> None:
        job = await create(here)
        await (await next_run(here)).succeed()
        model = (await reached(here, job.id, "succeeded")).fine_tuned_model
        path, listed = f"/v1/models/{model}", "/v1/fine_tuning/models"
        for key, is_shown in (("one-other", False), ("one-base", True), ("two-base", False)):
            names = [each["id"] for each in (await here.raw("GET", listed, key)).json()["data"]]
            assert (model in names) is is_shown
        for key in ("one-other", "two-base"):
            assert error_of(await here.raw("DELETE", path, key), 404)["code"] == "model_not_found"
        assert (await here.raw("DELETE", path, "one-base")).status_code == 200

    play(url, scenario)


REFUSED: list[tuple[dict[str, Any], int, str | None]] = [
    ({"model": None}, 400, "model"),
    ({"model": "nope"}, 404, None),
    ({"training_file": "file-nope"}, 400, "training_file"),
    ({"validation_file": "file-nope"}, 400, "validation_file"),
    ({"suffix": "x" * 65}, 400, "suffix"),
    ({"suffix": "a:b"}, 400, "suffix"),
    ({"seed": -1}, 400, "seed"),
    ({"seed": "7"}, 400, "seed"),
    ({"n_epochs": 3}, 400, "n_epochs"),
    ({"hyperparameters": {"n_epochs": 0}}, 400, "hyperparameters.n_epochs"),
    ({"hyperparameters": {"n_epochs": "many"}}, 400, "hyperparameters.n_epochs"),
    ({"hyperparameters": {"batch_size": 257}}, 400, "hyperparameters.batch_size"),
    (
        {"hyperparameters": {"learning_rate_multiplier": 0}},
        400,
        "hyperparameters.learning_rate_multiplier",
    ),
    ({"hyperparameters": {"warmup": 1}}, 400, "hyperparameters.warmup"),
    ({"method": {"type": "dpo", "dpo": {}}}, 400, "method.type"),
    ({"method": {"type": "supervised", "reinforcement": {}}}, 400, "method.reinforcement"),
    (
        {"method": {"type": "supervised", "supervised": {"hyperparameters": {"beta": 1}}}},
        400,
        "method.supervised.hyperparameters.beta",
    ),
    ({"method": {"supervised": {}}}, 400, "method.type"),
    ({"integrations": [{"type": "wandb"}]}, 400, "integrations"),
    ({"metadata": {"a": 1}}, 400, "metadata"),
    ({"mico": {"rank": 0}}, 400, "mico.rank"),
    ({"mico": {"rank": 128}}, 400, "model"),  # above what the site trains
    ({"mico": {"target": "mlp"}}, 400, "mico.target"),
    ({"mico": {"dropout": 0.1}}, 400, "mico.dropout"),
]


def test_a_job_is_refused_with_the_field(url: str) -> None:
    async def scenario(here: Replica) -> None:
        body = {"model": "m", "training_file": await upload(here, rows())}
        for change, status, param in REFUSED:
            error = error_of(await here.raw("POST", JOBS, json=body | change), status)
            assert error["param"] == param, (change, error)
        accepted = body | {
            "integrations": [],
            "validation_file": None,
            "hyperparameters": {"n_epochs": "auto"},
        }
        assert (await here.raw("POST", JOBS, json=accepted)).status_code == 200

    play(url, scenario)


def test_where_no_site_trains_a_job_is_refused_and_says_why(url: str) -> None:
    async def scenario(here: Replica) -> None:
        body = {"model": "m", "training_file": await upload(here, rows())}
        error = error_of(await here.raw("POST", JOBS, json=body), 400)
        assert error["code"] == "model_not_trainable"
        assert "no site that serves 'm' trains" in error["message"]
        assert (await here.raw("GET", JOBS)).json()["data"] == []

    play(url, scenario, trains=None)


def test_a_base_is_trained_although_a_route_has_its_name(url: str) -> None:
    routes = {
        "m": ModelRoute("m", (Target("other"), Target("m"))),
        "alias": ModelRoute("alias", (Target("m"),)),
    }

    async def scenario(here: Replica) -> None:
        job = await create(here)
        assert (await next_run(here)).order.model == job.model == "m"
        error = error_of(
            await here.raw("POST", JOBS, json={"model": "alias", "training_file": job.training_file}), 400
        )
        assert "'alias' is a route: name the base" in error["message"]

    play(url, scenario, routes=lambda: routes)


FAULTS = [
    (b"", "the file has no lines"),
    (rows(2) + b"{\n", "line 3: is not JSON"),
    (rows(1) + b'{"messages": []}\n', "line 2: messages is empty"),
    (b'{"messages": [], "a\\u0000b": 1}\n', "line 1: a b is not a known field"),
    (b'{"messages": [{"role": "user", "content": "x"}]}', "line 1: messages has no message of the assistant"),
]


def test_a_bad_file_fails_the_job_before_training_and_names_the_line(url: str) -> None:
    async def scenario(here: Replica) -> None:
        for content, fault in FAULTS[1:]:
            failed = await reached(here, (await create(here, content)).id, "failed")
            assert failed.error is not None
            assert (failed.error.code, failed.error.param) == ("invalid_training_file", "training_file")
            assert fault in failed.error.message
            listed = (await here.sdk().fine_tuning.jobs.list_events(failed.id)).data
            assert any(fault in each.message and each.level == "error" for each in listed)
        assert here.orders.empty()  # no site was told of any

    play(url, scenario)


def test_a_job_pauses_resumes_from_its_snapshot_and_is_cancelled(url: str) -> None:
    async def scenario(here: Replica) -> None:
        jobs = here.sdk().fine_tuning.jobs
        job = await create(here)
        run = await next_run(here)
        assert not run.order.HasField("snapshot")
        await run.report(2)
        paused = await jobs.pause(job.id)
        assert paused.status == "queued"
        await stopped(here, run, snapshot=True)
        await run.store(pb.StoreBegin.SNAPSHOT, 2, b"moments" * 700)
        await run.report(2, end=pb.Training.STOPPED)
        await stopped(here, run, snapshot=False)
        state = (await here.raw("GET", f"{JOBS}/{job.id}")).json()
        assert (state["status"], state["mico"]["paused"], state["mico"]["step"]) == ("queued", True, 2)
        await jobs.resume(job.id)
        again = await next_run(here)
        assert again.order.run != run.order.run
        assert await again.fetch(again.order.snapshot) == b"moments" * 700
        assert again.order.revision == "rev-1"
        await again.report(3)
        await recorded(here, job.id, 3)
        cancelled = await jobs.cancel(job.id)
        assert (cancelled.status, cancelled.trained_tokens) == ("cancelled", 300)
        await stopped(here, again, snapshot=False)
        assert (await jobs.cancel(job.id)).status == "cancelled"
        with pytest.raises(openai.BadRequestError):
            await jobs.resume(job.id)

    play(url, scenario)


def test_jobs_are_listed_by_their_metadata(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "FILTERED_AT_ONCE", 2)

    async def scenario(here: Replica) -> None:
        jobs = here.sdk().fine_tuning.jobs
        abouts: list[dict[str, str] | None] = [{"for": "a"}, {"for": "b", 'a"[.]': "é"}, None, {"for": "a"}]
        made = [(await create(here, metadata=each)).id for each in abouts for _ in range(2)]

        async def listed(limit: int = 1, **asked: Any) -> list[str]:
            return [each.id async for each in jobs.list(limit=limit, **asked)]

        assert await listed() == made[::-1]
        for limit in (1, 2, 3, 20):
            assert await listed(limit, metadata={"for": "a"}) == [*made[:5:-1], *made[1::-1]]
        assert await listed(metadata={"for": "b", 'a"[.]': "é"}) == made[3:1:-1]
        assert await listed(metadata={"for": "a", 'a"[.]': "é"}) == await listed(metadata={"x": "a"}) == []
        assert await listed(extra_query={"metadata": "null"}) == made[5:3:-1]
        assert (await here.raw("GET", f"{JOBS}?metadata[for]=a&order=asc&limit=1")).json()["has_more"]

    play(url, scenario)


def test_events_stream_until_the_job_has_ended(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fine_tuning, "STREAM_POLL_S", 0.02)

    async def scenario(here: Replica) -> None:
        job = await create(here)

        async def stream() -> list[str]:
            response = await here.raw("GET", f"{JOBS}/{job.id}/events?stream=true")
            assert response.headers["content-type"].startswith("text/event-stream")
            return [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]

        streaming = asyncio.create_task(stream())
        run = await next_run(here)
        await run.succeed()
        *events, done = await streaming
        assert done == "[DONE]"
        messages = [json.loads(each)["message"] for each in events]
        assert messages[0].startswith("The job was created") and messages[-1].startswith("The job succeeded")
        assert sum(message.startswith("Step ") for message in messages) == 6

    play(url, scenario)


def test_a_tenant_streams_events_to_so_many_at_a_time(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each stream asks the database every second: who opened thousands kept it from all others."""
    monkeypatch.setattr(fine_tuning, "STREAM_POLL_S", 0.02)
    monkeypatch.setattr(fine_tuning, "MAX_STREAMS", 2)

    async def scenario(here: Replica) -> None:
        jobs = {key: (await create(here, key=key)).id for key in ("one", "two")}

        async def status(key: str) -> int:
            return (await here.raw("GET", f"{JOBS}/{jobs[key]}/events?stream=true", key)).status_code

        streams = [asyncio.create_task(status("one")) for _ in range(3)]
        async with asyncio.timeout(60):
            (refused,), _ = await asyncio.wait(streams, return_when=asyncio.FIRST_COMPLETED)
        assert await refused == 429
        streams.append(asyncio.create_task(status("two")))
        for key, job_id in jobs.items():
            await here.raw("POST", f"{JOBS}/{job_id}/cancel", key)
        assert sorted(await asyncio.gather(*streams)) == [200, 200, 200, 429]
        assert await status("one") == 200

    play(url, scenario)


def test_trained_tokens_cost_money_and_are_recorded_once(url: str) -> None:
    async def scenario(here: Replica) -> None:
        job = await create(here)
        run: Run = await next_run(here)
        await run.report(5)
        await recorded(here, job.id, 5)
        await run.succeed()
        await reached(here, job.id, "succeeded")
        found = await here.tuning.service.ledger.get("tenant-1", job.id)
        assert found is not None
        assert (found.trained_tokens, found.nano_usd) == (600, 600 * 2_000)
        assert await spent(here) == [(("a", "cloud-a"), 600 * 2_000)]

    play(url, scenario)


def test_what_a_job_cost_is_of_its_last_site_although_it_ended_while_it_rested(url: str) -> None:
    async def scenario(here: Replica) -> None:
        job = await create(here)
        run = await next_run(here)
        await run.report(2)
        await recorded(here, job.id, 2)
        await here.sdk().fine_tuning.jobs.pause(job.id)
        await stopped(here, run, snapshot=True)
        await run.report(2, end=pb.Training.STOPPED)
        await stopped(here, run, snapshot=False)
        assert (await here.raw("GET", f"{JOBS}/{job.id}")).json()["mico"]["site"] is None
        await here.sdk().fine_tuning.jobs.cancel(job.id)
        assert (await here.raw("GET", f"{JOBS}/{job.id}")).json()["mico"]["site"] == "a"
        assert await spent(here) == [(("a", "cloud-a"), 200 * 2_000)]

    play(url, scenario)


async def spent(here: Replica) -> list[tuple[tuple[str, ...], int]]:
    """Return what usage says was spent, by site and cloud."""
    totals = await OperatorReads(here.tuning.service.ledger._engine).totals(TotalBy.SITE, TotalBy.CLOUD)
    return [(each.names, each.nano_usd) for each in totals]
