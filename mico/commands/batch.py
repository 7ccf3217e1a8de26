"""`mico batch …`: files of queries that the gateway answers when it has spare capacity."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from gateway.batches.values import ORDER_KEY, Order
from gateway.wording import several
from mico.errors import CommandFailed, ExitCode, GatewayUnavailable
from mico.options import GatewayOptions, Json, RequestFile, with_option_groups
from mico.output_paths import check_output_file
from mico.session import Session, session_of

if TYPE_CHECKING:
    from mico.client import Client

app = typer.Typer(help="Files of queries, answered when there is spare capacity.", no_args_is_help=True)

T = TypeVar("T")
Batch = dict[str, Any]
POLL_S = 1.0
UNAVAILABLE_TIMEOUT_S = 180.0
"""Time to wait for a gateway that restarts."""
FINAL_STATUSES = ("completed", "failed", "expired", "cancelled")
ENDPOINT = "/v1/chat/completions"
MAX_FAULTS_SHOWN = 10

BatchId = Annotated[str, typer.Argument(metavar="ID", help="A batch id, as in mico batch list.")]
Endpoint = Annotated[str, typer.Option(help="API path that every line is sent to.")]
OrderOption = Annotated[
    Order, typer.Option("--order", help="Order of the lines; blend weighs lengths and common beginnings.")
]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", help="File for the answers; errors go to a file beside it.")
]


@app.command("run")
@with_option_groups
def run(
    context: typer.Context,
    *,
    requests: RequestFile,
    output: Output = None,
    endpoint: Endpoint = ENDPOINT,
    order: OrderOption = Order.BLEND,
    gateway: GatewayOptions,
    as_json: Json = False,
) -> None:
    """Submit, wait and fetch. Ctrl-C leaves the batch running and prints how to continue."""
    session = session_of(context)
    client = session.client(*gateway)
    source = request_file(*requests)
    answers = output or source.with_suffix(".out.jsonl")
    check_output_file(answers, source=source)
    check_output_file(errors_path(answers), source=source)
    batch = upload_and_submit(session, client, source, endpoint, order)
    session.terminal.info(f"{batch['id']} is submitted")
    wait_and_fetch(session, client, batch["id"], answers, as_json)


@app.command("submit")
@with_option_groups
def submit(
    context: typer.Context,
    *,
    requests: RequestFile,
    endpoint: Endpoint = ENDPOINT,
    order: OrderOption = Order.BLEND,
    gateway: GatewayOptions,
    as_json: Json = False,
) -> None:
    """Upload and submit a file; print the batch id."""
    session = session_of(context)
    batch = upload_and_submit(session, session.client(*gateway), request_file(*requests), endpoint, order)
    if as_json:
        session.terminal.json(batch)
    else:
        session.terminal.data(batch["id"])


@app.command("plan")
@with_option_groups
def plan(
    context: typer.Context, *, requests: RequestFile, endpoint: Endpoint = ENDPOINT, as_json: Json = False
) -> None:
    """Show what the lines of a file have in common; submit nothing."""
    from gateway.batches.answer_line import ENDPOINTS
    from gateway.batches.preview import preview
    from gateway.batches.reading import InvalidLine
    from gateway.batches.values import BatchLimits
    from gateway.errors import BadRequest

    session, file = session_of(context), request_file(*requests)
    if endpoint not in ENDPOINTS:
        tip = f"there are {', '.join(ENDPOINTS)}"
        raise CommandFailed(f"no lines can ask {endpoint}", tip=tip, exit_code=ExitCode.WRONG_USAGE)
    try:
        found = preview(file, endpoint, BatchLimits())
    except InvalidLine as invalid:
        raise CommandFailed(f"line {invalid.error.line} is no request", cause=str(invalid)) from invalid
    except BadRequest as refused:
        raise CommandFailed("a line would be refused", cause=str(refused)) from refused
    if not found.lines:
        raise CommandFailed(f"{file} has no lines", tip="a batch of such a file fails")
    share = found.shared_tokens / max(1, found.prompt_tokens)
    if as_json:
        session.terminal.json({**found._asdict(), "shared_share": round(share, 4)})
        return
    session.terminal.data(f"{several(found.lines, 'line')}, about {found.prompt_tokens:,} prompt tokens")
    session.terminal.data(
        f"{several(found.grouped_lines, 'line')} in {several(found.groups, 'group')} that begin alike: "
        f"{share:.0%} of the prompt tokens need not be computed again"
    )


@app.command("list")
@with_option_groups
def list_batches(
    context: typer.Context,
    *,
    limit: Annotated[int, typer.Option(min=1, max=100, help="Maximum number of entries, newest first.")] = 20,
    gateway: GatewayOptions,
    as_json: Json = False,
) -> None:
    """List the newest batches and their progress."""
    session = session_of(context)
    found = session.client(*gateway).get(f"/v1/batches?limit={limit}").objects("data")
    session.terminal.listing(found, table_row, "no batch was submitted yet", as_json=as_json)


@app.command("show")
@with_option_groups
def show(
    context: typer.Context,
    *,
    batch_id: BatchId,
    gateway: GatewayOptions,
    as_json: Json = False,
) -> None:
    """Show everything about one batch."""
    session = session_of(context)
    batch = session.client(*gateway).get(path_of(batch_id))
    if as_json:
        session.terminal.json(batch)
        return
    figures = {name: value for name, value in batch.items() if name != "mico"} | batch.get("mico", {})
    session.terminal.table(
        ["figure", "value"], [[name, format_value(name, value)] for name, value in figures.items()]
    )


@app.command("cancel")
@with_option_groups
def cancel(
    context: typer.Context,
    *,
    batch_id: BatchId,
    gateway: GatewayOptions,
    as_json: Json = False,
) -> None:
    """Cancel a batch. Answers that it has can still be fetched."""
    session = session_of(context)
    batch = session.client(*gateway).post(f"{path_of(batch_id)}/cancel", {})
    if as_json:
        session.terminal.json(batch)
    else:
        session.terminal.info(f"{batch['id']} is {batch['status']}")


@app.command("fetch")
@with_option_groups
def fetch(
    context: typer.Context,
    *,
    batch_id: BatchId,
    output: Output = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait until the batch has ended, as mico batch run does.")
    ] = False,
    gateway: GatewayOptions,
    as_json: Json = False,
) -> None:
    """Write the answers of an ended batch to a file."""
    session = session_of(context)
    client = session.client(*gateway)
    target = output or Path(f"{batch_id}.out.jsonl")
    check_output_file(target)
    if not wait and (status := client.get(path_of(batch_id))["status"]) not in FINAL_STATUSES:
        raise CommandFailed(f"{batch_id} is {status}", tip="--wait waits until it is over")
    wait_and_fetch(session, client, batch_id, target, as_json)


def path_of(batch_id: str) -> str:
    """Return the path of a batch. Raises CommandFailed for an empty id, whose path is that of all batches."""
    from urllib.parse import quote

    if not batch_id:
        tip = "mico batch list shows the ids"
        raise CommandFailed("no batch is named", tip=tip, exit_code=ExitCode.WRONG_USAGE)
    return f"/v1/batches/{quote(batch_id, safe='')}"


def request_file(file: Path | None, source: Path | None) -> Path:
    """Return the request file, named in either way. Raises CommandFailed if it is missing or named twice."""
    path = source if file is None else file
    if path is None or (file is not None and source is not None):
        tip = "mico batch run FILE -o ANSWERS"
        raise CommandFailed("name one file of requests", tip=tip, exit_code=ExitCode.WRONG_USAGE)
    if not path.is_file():
        raise CommandFailed(f"there is no file {path}", exit_code=ExitCode.WRONG_USAGE)
    return path


def errors_path(output: Path) -> Path:
    """Return the path of the file of errors beside the answers."""
    return output.with_name(f"{output.stem}.errors{output.suffix}")


def upload_and_submit(session: Session, client: Client, file: Path, endpoint: str, order: Order) -> Batch:
    metadata = {} if order is Order.BLEND else {"metadata": {ORDER_KEY: order}}
    with client.uploads("batch") as upload:
        with session.terminal.spinner(f"uploading {file.name}, {file.stat().st_size:,} bytes"):
            file_id = upload(file)
        body = {"input_file_id": file_id, "endpoint": endpoint, "completion_window": "24h"}
        return client.post("/v1/batches", body | metadata)


def wait_and_fetch(session: Session, client: Client, batch_id: str, output: Path, as_json: bool) -> None:
    """Wait for a batch, download its files, and exit with the status that tells success from failure."""
    try:
        batch = wait_until_ended(session, client, batch_id)
    except KeyboardInterrupt:
        session.terminal.info(f"{batch_id} goes on without you. To wait for it and fetch its answers:")
        session.terminal.info(f"  mico batch fetch {batch_id} --wait -o {output}")
        raise typer.Exit(ExitCode.INTERRUPTED) from None
    if batch["status"] == "failed":
        raise invalid_batch_error(batch)
    written = {
        name: ask_until_available(
            session, batch_id, partial(download, client, batch.get(f"{kind}_file_id"), path)
        )
        for name, kind, path in (("output", "output", output), ("errors", "error", errors_path(output)))
    }
    print_result(session, batch, written, as_json)
    if batch["status"] != "completed" or batch["request_counts"]["failed"]:
        raise typer.Exit(ExitCode.PARTLY_FAILED)


def wait_until_ended(session: Session, client: Client, batch_id: str) -> Batch:
    """Return the batch once it has ended; wait for a gateway that is unavailable for a while."""
    from mico.progress import count_progress

    with count_progress(session.terminal) as show_count:
        while True:
            batch = ask_until_available(session, batch_id, partial(client.get, path_of(batch_id)))
            counts = batch["request_counts"]
            show_count(batch["status"], counts["completed"], counts["failed"], counts["total"])
            if batch["status"] in FINAL_STATUSES:
                return batch
            time.sleep(POLL_S)


def ask_until_available(session: Session, batch_id: str, ask: Callable[[], T]) -> T:
    """Return the result of `ask`, which is repeated while no gateway answers. Raises CommandFailed."""
    failed_s: float | None = None  # when it first failed
    while True:
        try:
            return ask()
        except GatewayUnavailable as failure:
            is_first = failed_s is None
            failed_s = time.monotonic() if failed_s is None else failed_s
            if time.monotonic() - failed_s > UNAVAILABLE_TIMEOUT_S:
                raise CommandFailed(
                    failure.error, cause=failure.cause, tip=f"later: mico batch fetch {batch_id} --wait"
                ) from failure
            if is_first:
                session.terminal.info(f"{failure.error}; it is asked again, and the batch is kept meanwhile")
            time.sleep(POLL_S)


def download(client: Client, file_id: str | None, path: Path) -> str | None:
    """Download a file of a batch; without one rename a file at its path, which would pass for it."""
    if file_id is None:
        if path.is_file() and not path.is_symlink():
            path.replace(path.with_name(f"{path.name}.old"))
        return None
    client.download(f"/v1/files/{file_id}/content", path)
    return str(path)


def print_result(session: Session, batch: Batch, written: Mapping[str, str | None], as_json: bool) -> None:
    if as_json:
        session.terminal.json({**batch, **{f"{name}_path": path for name, path in written.items()}})
        return
    counts = batch["request_counts"]
    session.terminal.info(
        f"{batch['id']} is {batch['status']}: {counts['completed']} of {several(counts['total'], 'line')}"
        f" answered, {several(counts['failed'], 'with an error', 'with errors')}"
    )
    for path in filter(None, written.values()):
        session.terminal.data(path)


def invalid_batch_error(batch: Batch) -> CommandFailed:
    faults = (batch.get("errors") or {}).get("data") or []
    prefixes = [f"line {fault['line']}: " if fault.get("line") else "" for fault in faults]
    sentences = [lead + str(fault.get("message")) for lead, fault in zip(prefixes, faults, strict=True)]
    more = len(sentences) - MAX_FAULTS_SHOWN
    cause = "\n       ".join([*sentences[:MAX_FAULTS_SHOWN], *([f"{more} more"] if more > 0 else [])])
    return CommandFailed("the file is no batch", cause=cause, tip=f"mico batch show {batch['id']} --json")


def table_row(batch: Batch) -> dict[str, str]:
    counts = batch["request_counts"]
    return {
        "batch": batch["id"],
        "status": batch["status"],
        "model": batch.get("model", "-"),
        "answered": f"{counts['completed']}/{counts['total']}",
        "with errors": str(counts["failed"]),
        "submitted": format_unix_time(batch["created_at"]),
        "ends": format_unix_time(ends) if (ends := batch.get("mico", {}).get("ends_at")) else "-",
        "expires": format_unix_time(batch["expires_at"]),
    }


def format_value(name: str, value: object) -> str:
    if name.endswith("_at") and isinstance(value, int):
        return format_unix_time(value)
    if name.endswith("_share") and isinstance(value, float):
        return f"{value:.0%}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {format_value(key, part)}" for key, part in value.items())
    return str(value)


def format_unix_time(unix_s: int) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="seconds")
