"""Serves /v1/fine_tuning/jobs: create, list, cancel, pause and resume jobs, their events and checkpoints."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Container, Iterator
from contextlib import contextmanager
from typing import Any, Final

import msgspec
from litestar import Request, Response, delete, get, post
from litestar.handlers import HTTPRouteHandler
from litestar.types import ASGIApp, Receive, Scope, Send

from gateway.batches.files import Page
from gateway.domain import Caller
from gateway.errors import BadRequest, ModelNotFound, NotFound, TooMany
from gateway.http.auth import authenticate
from gateway.http.backend import Backend
from gateway.http.body import ClientGone, json_response
from gateway.http.disconnect import while_connected
from gateway.http.error_handler import database_errors
from gateway.http.exchange import AnyRequest, path_after
from gateway.http.fine_tuning_body import read_job
from gateway.http.pagination import list_response, read_page
from gateway.http.sse import EventStream
from gateway.openai.fields import echo
from gateway.tuning.events import event_id
from gateway.tuning.ledger import TooManyJobs, UnknownFile
from gateway.tuning.registry import find_model, may_use, name_of
from gateway.tuning.service import TuningService
from gateway.tuning.values import Content, Event, Job, JobStatus, Kind, checkpoint_model

MAX_PAGE: Final = 100
DEFAULT_PAGE: Final = 20
MAX_EVENTS_PAGE: Final = 1_000
STREAM_POLL_S: Final = 1.0
STREAM_WITHIN_S: Final = 24 * 3_600.0
MAX_STREAMS: Final = 16
"""Maximum open event streams per tenant and process. Each queries the database twice a second."""
DONE: Final = b"data: [DONE]\n\n"


def tuning_routes(backend: Backend, tuning: TuningService) -> list[HTTPRouteHandler]:
    return [
        *_job_routes(backend, tuning),
        *_turning_routes(backend, tuning),
        *_list_routes(backend, tuning),
        *_model_routes(backend, tuning),
    ]


def _job_routes(backend: Backend, tuning: TuningService) -> list[HTTPRouteHandler]:
    @post("/v1/fine_tuning/jobs", status_code=200)
    async def create_job(request: AnyRequest) -> Response[bytes]:
        caller = await authenticate(request.scope, backend)

        def read(body: dict[str, object]) -> Job:
            return read_job(body, caller, backend.unix_time())

        try:
            job = await backend.read_json(request.scope, request.receive, caller, read)
        except ClientGone:
            return json_response({})
        await _submit(job, caller, backend, tuning)
        tuning.wake()
        return json_response(job_json(job, backend.unix_time()))

    @get("/v1/fine_tuning/jobs")
    async def list_jobs(request: AnyRequest) -> Response[bytes]:
        caller = await authenticate(request.scope, backend)
        page = read_page(request, DEFAULT_PAGE, MAX_PAGE)
        with database_errors(page):
            rows = await tuning.ledger.list_page(caller.tenant, page, _asked_metadata(request))
        now_s = backend.unix_time()
        return list_response([job_json(job, now_s) for job in rows], page)

    @get("/v1/fine_tuning/jobs/{job_id:str}")
    async def retrieve_job(request: AnyRequest) -> Response[bytes]:
        job = await _asked_job(request, backend, tuning)
        return json_response(job_json(job, backend.unix_time()))

    return [create_job, list_jobs, retrieve_job]


def _turning_routes(backend: Backend, tuning: TuningService) -> list[HTTPRouteHandler]:
    async def turn_job(
        request: AnyRequest, turn: Callable[[str, str], Awaitable[bool]], verb: str, *already: JobStatus
    ) -> Response[bytes]:
        """Change a job's state by `turn`. A job whose status is in `already` is returned unchanged."""
        job = await _asked_job(request, backend, tuning)
        with database_errors():
            turned = await turn(job.tenant, job.id)
            job = await _get_job(tuning, job.tenant, job.id)
        if not turned and job.status not in already:
            raise BadRequest(f"The job is {job.status}: there is nothing to {verb}.", param="id")
        tuning.wake()
        return json_response(job_json(job, backend.unix_time()))

    @post("/v1/fine_tuning/jobs/{job_id:str}/cancel", status_code=200)
    async def cancel_job(request: AnyRequest) -> Response[bytes]:
        return await turn_job(request, tuning.ledger.cancel, "cancel", JobStatus.CANCELLED)

    @post("/v1/fine_tuning/jobs/{job_id:str}/pause", status_code=200)
    async def pause_job(request: AnyRequest) -> Response[bytes]:
        return await turn_job(request, tuning.ledger.pause, "pause", JobStatus.PAUSED)

    @post("/v1/fine_tuning/jobs/{job_id:str}/resume", status_code=200)
    async def resume_job(request: AnyRequest) -> Response[bytes]:
        return await turn_job(request, tuning.ledger.resume, "resume")

    return [cancel_job, pause_job, resume_job]


def _list_routes(backend: Backend, tuning: TuningService) -> list[HTTPRouteHandler]:
    events = _EventList(backend, tuning)

    @get("/v1/fine_tuning/jobs/{job_id:str}/events")
    async def list_events() -> ASGIApp:
        return events

    @get("/v1/fine_tuning/jobs/{job_id:str}/checkpoints")
    async def list_checkpoints(request: AnyRequest) -> Response[bytes]:
        job = await _asked_job(request, backend, tuning)
        page = read_page(request, 10, MAX_PAGE)
        with database_errors():
            rows = await tuning.contents.of_job(job.id, Kind.CHECKPOINT)
            figures = await _figures(tuning, job)
        listed = [_checkpoint_json(job, each, figures.get(each.step, {})) for each in rows]
        if not page.newest_first:
            listed.reverse()
        names = [each["id"] for each in listed]
        if page.after is not None and page.after not in names:
            raise BadRequest(f"There is no {page.after!r} to go on from."[:200], param="after")
        begin = 0 if page.after is None else names.index(page.after) + 1
        return list_response(listed[begin : begin + page.limit + 1], page)

    return [list_events, list_checkpoints]


def _model_routes(backend: Backend, tuning: TuningService) -> list[HTTPRouteHandler]:
    @get("/v1/fine_tuning/models")
    async def list_models(request: AnyRequest) -> Response[bytes]:
        """List the tuned models that the caller may use, including those that no site serves now."""
        caller = await authenticate(request.scope, backend)
        with database_errors():
            models = await tuning.contents.models(caller.tenant)
        models = [(job, content) for job, content in models if may_use(caller, job, content)]
        served = {each.id for each in backend.models()}
        listed = [_model_json(job, content, served) for job, content in reversed(models)]
        return json_response({"object": "list", "data": listed, "has_more": False})

    @delete("/v1/models/{model_id:path}", status_code=200)
    async def delete_model(request: AnyRequest) -> Response[bytes]:
        caller = await authenticate(request.scope, backend)
        name = path_after(request, "/v1/models/")
        with database_errors():
            found = await find_model(tuning.contents, caller, name)
            if found is None or not await tuning.remove(found):
                raise ModelNotFound(f"You have no tuned model '{name[:200]}'.")
        tuning.wake()
        return json_response({"id": name, "object": "model", "deleted": True})

    return [list_models, delete_model]


async def _submit(job: Job, caller: Caller, backend: Backend, tuning: TuningService) -> None:
    """Store a new job, or refuse it if no site could train it.

    Raises BadRequest, Forbidden, NotFound or TooMany.
    """
    model = tuning.served().get(job.model)  # a base may have the name of a route
    exists = job.model in backend.routes() if model is None else model.tenant in ("", caller.tenant)
    if not exists or not caller.may_use(job.model):
        raise NotFound(f"The model {echo(job.model)} does not exist, or this key may not use it.")
    if model is None or model.parent:
        what = "a route" if model is None else "a variant itself"
        raise BadRequest(f"{echo(job.model)} is {what}: name the base that is trained.", param="model")
    if (error := tuning.refusal(caller, job.model, job.plan)) is not None:
        raise error
    with database_errors():
        try:
            await tuning.ledger.create(job)
        except UnknownFile as exc:
            raise BadRequest(
                f"'{exc.param}' names no file that was uploaded with the purpose 'fine-tune'.",
                param=exc.param,
                code="invalid_value",
            ) from exc
        except TooManyJobs as exc:
            raise TooMany(f"The job was not accepted: {exc.what}.", retry_after_s=60.0) from exc


def _asked_metadata(request: AnyRequest) -> dict[str, str] | None:
    """Return the pairs of `metadata[name]=value`; None for `metadata=null`, jobs without metadata."""
    if request.query_params.get("metadata") == "null":
        return None
    given = request.query_params.items()
    named = ((name.removeprefix("metadata["), value) for name, value in given if name.startswith("metadata["))
    return {name.removesuffix("]"): value for name, value in named if name.endswith("]")}


async def _asked_job(request: AnyRequest, backend: Backend, tuning: TuningService) -> Job:
    """Return the job that the path names. Raises NotFound if it is not of the caller's tenant."""
    caller = await authenticate(request.scope, backend)
    with database_errors():
        return await _get_job(tuning, caller.tenant, request.path_params["job_id"])


async def _get_job(tuning: TuningService, tenant: str, job_id: str) -> Job:
    job = await tuning.ledger.get(tenant, job_id)
    if job is None:
        raise NotFound(f"No fine-tuning job found with id '{job_id[:100]}'.", param="id")
    return job


class _EventList:
    """ASGI application that lists the events of a job, or streams all of them until the job has ended."""

    def __init__(self, backend: Backend, tuning: TuningService) -> None:
        self._backend = backend
        self._tuning = tuning
        self._streaming: list[str] = []  # the tenant of each open stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request: AnyRequest = Request(scope)
        job = await _asked_job(request, self._backend, self._tuning)
        if request.query_params.get("stream") in ("true", "1"):
            with self._stream_of(job.tenant):
                await while_connected(self._stream(job, send), receive, within_s=STREAM_WITHIN_S)
            return
        page = read_page(request, DEFAULT_PAGE, MAX_EVENTS_PAGE)
        with database_errors(page):
            rows = await self._tuning.events.list_page(job.id, page)
        listed = list_response([event_json(job, each) for each in rows], page)
        await listed.to_asgi_response(None, request)(scope, receive, send)

    @contextmanager
    def _stream_of(self, tenant: str) -> Iterator[None]:
        """Count a stream of the tenant while it is open. Raises TooMany above MAX_STREAMS."""
        if self._streaming.count(tenant) >= MAX_STREAMS:
            raise TooMany(f"{MAX_STREAMS} streams of events are open, the most at one time: end some.")
        self._streaming.append(tenant)
        try:
            yield
        finally:
            self._streaming.remove(tenant)

    async def _stream(self, job: Job, send: Send) -> None:
        backend, tuning = self._backend, self._tuning
        events = EventStream(
            send, backend.clock, keep_alive_s=backend.keep_alive_s, first_byte_s=backend.first_byte_s
        )
        last: str | None = None
        async with events:
            await events.start()
            while True:
                with database_errors():
                    current = await tuning.ledger.get(job.tenant, job.id)  # read before its last events
                    page = Page(MAX_EVENTS_PAGE, newest_first=False, after=last)
                    rows = (await tuning.events.list_page(job.id, page))[:MAX_EVENTS_PAGE]
                for each in rows:
                    await events.write(b"data: " + msgspec.json.encode(event_json(job, each)) + b"\n\n")
                last = event_id(job.id, rows[-1].number) if rows else last
                if len(rows) < MAX_EVENTS_PAGE:
                    if current is None or current.ended:
                        break
                    await asyncio.sleep(STREAM_POLL_S)
            await events.end(DONE)


def job_json(job: Job, now_s: float) -> dict[str, Any]:
    """Render OpenAI's job object. A paused job has the status `queued`, and `mico.paused` is true."""
    plan = job.plan
    hyperparameters = {
        "n_epochs": plan.epochs,
        "batch_size": plan.batch_size,
        "learning_rate_multiplier": plan.learning_rate_multiplier,
    }
    paused, finish = job.status is JobStatus.PAUSED, job.estimate_finish(now_s)
    return {
        "id": job.id,
        "object": "fine_tuning.job",
        "model": job.model,
        "created_at": int(job.created_at),
        "finished_at": None if job.finished_at is None else int(job.finished_at),
        "fine_tuned_model": job.tuned_model if job.status is JobStatus.SUCCEEDED else None,
        "organization_id": job.tenant,
        "status": JobStatus.QUEUED if paused else job.status,
        "hyperparameters": hyperparameters,
        "method": {"type": "supervised", "supervised": {"hyperparameters": hyperparameters}},
        "trained_tokens": job.trained_tokens if job.ended else None,
        "training_file": job.training_file_id,
        "validation_file": job.validation_file_id,
        "result_files": [] if job.result_file_id is None else [job.result_file_id],
        "seed": plan.seed,
        "estimated_finish": None if finish is None else int(finish),
        "error": None if job.error is None else job.error._asdict(),
        "user_provided_suffix": job.suffix or None,
        "metadata": job.about,
        "integrations": [],
        "mico": {
            "rank": plan.rank,
            "alpha": plan.alpha,
            "target": plan.target,
            "paused": paused,
            "site": (job.site or None) if job.run is not None or job.ended else None,
            "step": job.step,
            "total_steps": job.total_steps,
            "trained_tokens": job.trained_tokens,
            "tokens_per_s": job.tokens_per_s,
        },
    }


def event_json(job: Job, event: Event) -> dict[str, Any]:
    return {
        "id": event_id(job.id, event.number),
        "object": "fine_tuning.job.event",
        "created_at": int(event.at),
        "level": event.level,
        "message": event.message,
        "type": "message" if event.data is None else "metrics",
        "data": event.data or {},
    }


def _model_json(job: Job, content: Content, served: Container[str]) -> dict[str, Any]:
    name = name_of(job, content)
    return {
        "id": name,
        "object": "fine_tuning.model",
        "created_at": int(content.at),
        "model": job.model,
        "fine_tuning_job_id": job.id,
        "step_number": content.step,
        "checkpoint": content.kind is Kind.CHECKPOINT,
        "rank": job.plan.rank,
        "bytes": content.bytes,
        "served": name in served,
    }


async def _figures(tuning: TuningService, job: Job) -> dict[int, dict[str, Any]]:
    """Return the recorded figures of the job, by step."""
    listed = await tuning.events.list_page(job.id, Page(tuning.limits.events, newest_first=False))
    return {each.data["step"]: each.data for each in listed if each.data is not None}


def _checkpoint_json(job: Job, content: Content, figures: dict[str, Any]) -> dict[str, Any]:
    metrics = {"step": content.step} | {name: figures.get(name) for name in _METRICS}
    return {
        "id": f"ftckpt-{job.id.removeprefix('ftjob-')}-{content.step}",
        "object": "fine_tuning.job.checkpoint",
        "created_at": int(content.at),
        "fine_tuning_job_id": job.id,
        "fine_tuned_model_checkpoint": checkpoint_model(job.tuned_model, content.step),
        "step_number": content.step,
        "metrics": metrics,
    }


_METRICS: Final = ("train_loss", "train_mean_token_accuracy", "valid_loss")
