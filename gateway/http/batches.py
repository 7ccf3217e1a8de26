"""Serves /v1/batches: submit, retrieve, list and cancel the batches of the caller's tenant."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from litestar import Response, get, post
from litestar.handlers import HTTPRouteHandler

from gateway.batches.answer_line import ENDPOINTS
from gateway.batches.ledger import InputFileNotFound, Ledger, TooManyBatches, new_id
from gateway.batches.values import (
    COMPLETION_WINDOW,
    ORDER_KEY,
    WINDOW_S,
    Batch,
    BatchLimits,
    BatchStatus,
    File,
    Order,
)
from gateway.domain import Caller
from gateway.errors import BadRequest, NotFound, TooMany
from gateway.http.auth import authenticate
from gateway.http.backend import Backend
from gateway.http.body import ClientGone, json_response
from gateway.http.error_handler import database_errors
from gateway.http.exchange import AnyRequest
from gateway.http.files import read_expires_after
from gateway.http.pagination import list_response, read_page
from gateway.openai.fields import Fields, Problems, echo, whole_number

MAX_PAGE: Final = 100
DEFAULT_PAGE: Final = 20
MAX_METADATA_PAIRS: Final = 16
MAX_METADATA_NAME_CHARS: Final = 64
MAX_METADATA_VALUE_CHARS: Final = 512
_TIMES: Final = (
    "in_progress_at",
    "finalizing_at",
    "completed_at",
    "failed_at",
    "expired_at",
    "cancelling_at",
    "cancelled_at",
)
_OPTIONAL: Final = ("model", "output_file_id", "error_file_id", "usage")


def batch_routes(
    backend: Backend, ledger: Ledger, limits: BatchLimits, changed: Callable[[], None]
) -> list[HTTPRouteHandler]:
    """`changed` is called after a batch was submitted or cancelled, to wake the runner of this replica."""

    @post("/v1/batches", status_code=200)
    async def create_batch(request: AnyRequest) -> Response[bytes]:
        caller = await authenticate(request.scope, backend)

        def read(body: dict[str, object]) -> Batch:
            return read_batch(body, caller, backend.unix_time(), limits)

        try:
            batch = await backend.read_json(request.scope, request.receive, caller, read)
        except ClientGone:
            return json_response({})
        with database_errors():
            await submit(batch, ledger, limits)
        changed()
        return json_response(batch_json(batch))

    @get("/v1/batches")
    async def list_batches(request: AnyRequest) -> Response[bytes]:
        caller = await authenticate(request.scope, backend)
        page = read_page(request, DEFAULT_PAGE, MAX_PAGE)
        with database_errors(page):
            rows = await ledger.list_page(caller.tenant, page)
        return list_response([batch_json(batch) for batch in rows], page)

    @get("/v1/batches/{batch_id:str}")
    async def retrieve_batch(request: AnyRequest) -> Response[bytes]:
        caller = await authenticate(request.scope, backend)
        with database_errors():
            return json_response(
                batch_json(await get_batch(ledger, caller.tenant, request.path_params["batch_id"]))
            )

    @post("/v1/batches/{batch_id:str}/cancel", status_code=200)
    async def cancel_batch(request: AnyRequest) -> Response[bytes]:
        caller, batch_id = await authenticate(request.scope, backend), request.path_params["batch_id"]
        with database_errors():
            cancelled = await ledger.cancel(caller.tenant, batch_id)
            batch = await get_batch(ledger, caller.tenant, batch_id)
        if not cancelled and batch.cancelling_at is None:
            raise BadRequest(f"The batch is {batch.status}: there is nothing to cancel.", param="batch_id")
        changed()
        return json_response(batch_json(batch))

    return [create_batch, list_batches, retrieve_batch, cancel_batch]


def read_batch(body: dict[str, object], caller: Caller, now: float, limits: BatchLimits) -> Batch:
    """Read the body of a new batch. Raises BadRequest."""
    problems = Problems()
    fields = Fields(body, problems)
    file_id = fields.required_text("input_file_id")
    endpoint = _one_of(fields, "endpoint", tuple(ENDPOINTS))
    _one_of(fields, "completion_window", (COMPLETION_WINDOW,))
    metadata = read_metadata(fields)
    order = (metadata or {}).get(ORDER_KEY)
    if order is not None and order not in tuple(Order):
        fields.refuse(f"metadata.{ORDER_KEY}", f"is one of {', '.join(Order)}, got {echo(order)}")
    expires_after = fields.child("output_expires_after")
    problems.raise_any()
    kept_s = limits.kept_s
    if expires_after is not None:
        anchor, seconds = expires_after.text("anchor"), whole_number(expires_after.raw("seconds"))
        kept_s = read_expires_after(anchor, str(seconds), limits.kept_s, "output_expires_after")
    return Batch(
        id=new_id(now),
        tenant=caller.tenant,
        key_id=caller.key_id,
        endpoint=endpoint,
        input_file_id=file_id,
        created_at=now,
        expires_at=now + WINDOW_S,
        output_kept_s=kept_s,
        about=metadata,
    )


async def submit(batch: Batch, ledger: Ledger, limits: BatchLimits, new_file: File | None = None) -> None:
    """Store a new batch and, if given, publish its new input file. Raises BadRequest or TooMany."""
    try:
        await ledger.create(batch, limits.tenant_batches, new_file)
    except InputFileNotFound as exc:
        raise BadRequest(
            f"There is no file {echo(batch.input_file_id)} that was uploaded with the purpose 'batch'.",
            param="input_file_id",
            code="invalid_value",
        ) from exc
    except TooManyBatches as exc:
        raise TooMany(
            f"{limits.tenant_batches} batches are not over yet, the most at one time.", retry_after_s=60.0
        ) from exc


async def get_batch(ledger: Ledger, tenant: str, batch_id: str) -> Batch:
    """Return a batch of the tenant. Raises NotFound."""
    batch = await ledger.get(tenant, batch_id)
    if batch is None:
        raise NotFound(f"No batch found with id '{batch_id[:100]}'.", param="batch_id")
    return batch


def batch_json(batch: Batch) -> dict[str, Any]:
    """Render OpenAI's batch object. Fields that are not known yet are left out."""
    times = {name: int(at) for name in _TIMES if (at := getattr(batch, name)) is not None}
    known = {name: value for name in _OPTIONAL if (value := getattr(batch, name)) is not None}
    errors = {} if batch.errors is None else {"errors": {"object": "list", "data": batch.errors}}
    metadata = {} if batch.about is None else {"metadata": batch.about}
    counts = {"total": batch.total, "completed": batch.completed, "failed": batch.failed}
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "input_file_id": batch.input_file_id,
        "completion_window": batch.completion_window,
        "status": BatchStatus(batch.status),
        "created_at": int(batch.created_at),
        "expires_at": int(batch.expires_at),
        "request_counts": counts,
        **times,
        **known,
        **errors,
        **metadata,
        "mico": _progress_json(batch),
    }


def _progress_json(batch: Batch) -> dict[str, Any]:
    """Render the fields that OpenAI's object lacks: order, shared prompt tokens, queries in flight, end."""
    outline, runs = batch.outline, batch.status in (BatchStatus.IN_PROGRESS, BatchStatus.CANCELLING)
    expected = (
        {}
        if outline is None
        else {
            "groups": outline.groups,
            "shared_prompt_share": round(outline.shared_tokens / max(1, outline.prompt_tokens), 4),
            "expected_tokens": outline.response_tokens,
        }
    )
    running = {"in_flight": batch.in_flight} if runs else {}
    ends = {"ends_at": int(batch.ends_at)} if runs and batch.ends_at is not None else {}
    return {"order": batch.order, **expected, **running, **ends}


def _one_of(fields: Fields, name: str, known: tuple[str, ...]) -> str:
    value = fields.required_text(name)
    if value and value not in known:
        fields.refuse(name, f"is one of {', '.join(known)}, got {echo(value)}")
    return value


def read_metadata(fields: Fields) -> dict[str, str] | None:
    """Read OpenAI's `metadata`, a few short strings; None if it is omitted or refused."""
    metadata = fields.raw("metadata")
    if metadata is None:
        return None
    pairs = metadata if isinstance(metadata, dict) else {}
    are_valid = all(
        len(name) <= MAX_METADATA_NAME_CHARS
        and isinstance(value, str)
        and len(value) <= MAX_METADATA_VALUE_CHARS
        for name, value in pairs.items()
    )
    if not isinstance(metadata, dict) or len(pairs) > MAX_METADATA_PAIRS or not are_valid:
        fields.refuse(
            "metadata",
            f"is an object of at most {MAX_METADATA_PAIRS} strings, names up to {MAX_METADATA_NAME_CHARS}"
            f" characters, values up to {MAX_METADATA_VALUE_CHARS}",
        )
        return None
    return pairs
