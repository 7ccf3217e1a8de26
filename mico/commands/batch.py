"""`mico batch …`: files of queries that the gateway answers when there is room."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gateway.wording import several
from mico.errors import Away, CommandFailed, ExitCode
from mico.options import GatewayOptions, Json, RequestFile, with_option_groups
from mico.outputs import make_way
from mico.session import Session, session

if TYPE_CHECKING:
    from mico.client import Client

app = typer.Typer(help="Files of queries, answered when there is room.", no_args_is_help=True)

Batch = dict[str, Any]
POLL_S = 1.0
AWAY_WITHIN_S = 180.0
"""A gateway that restarts is waited for so long."""
ENDED = ("completed", "failed", "expired", "cancelled")
ENDPOINT = "/v1/chat/completions"
FAULTS_SHOWN = 10

BatchId = Annotated[str, typer.Argument(metavar="ID", help="As in mico batch list.")]
Endpoint = Annotated[str, typer.Option(help="What every line asks: this path.")]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", help="Where answers go; those with errors beside them.")
]


@app.command("run")
@with_option_groups
def run(
    context: typer.Context,
    *,
    requests: RequestFile,
    output: Output = None,
    endpoint: Endpoint = ENDPOINT,
    gateway: GatewayOptions,
    as_json: Json = False,
) -> None:
    """Submit, wait and fetch. Ctrl-C leaves the batch running and says how to go on."""
    here = session(context)
    client = here.client(*gateway)
    source = request_file(*requests)
    answers = output or source.with_suffix(".out.jsonl")
    for place in (answers, beside(answers)):
        make_way(place, read=source)
    batch = send(here, client, source, endpoint)
    here.terminal.say(f"{batch['id']} is submitted")
    finish(here, client, batch["id"], answers, as_json)


@app.command("submit")
@with_option_groups
def submit(
    context: typer.Context,
    *,
    requests: RequestFile,
    endpoint: Endpoint = ENDPOINT,
    gateway: GatewayOptions,
    as_json: Json = False,
) -> None:
    """Upload and submit; prints the id."""
    here = session(context)
    batch = send(here, here.client(*gateway), request_file(*requests), endpoint)
    if as_json:
        here.terminal.json(batch)
    else:
        here.terminal.data(batch["id"])


@app.command("list")
@with_option_groups
def list_batches(
    context: typer.Context,
    *,
    limit: Annotated[int, typer.Option(min=1, max=100, help="The newest so many.")] = 20,
    gateway: GatewayOptions,
    as_json: Json = False,
) -> None:
    """The newest batches and how far they are."""
    here = session(context)
    found = here.client(*gateway).get(f"/v1/batches?limit={limit}")["data"]
    if as_json:
        here.terminal.json(found)
    elif found:
        here.terminal.table(list(row(found[0])), [list(row(batch).values()) for batch in found])
    else:
        here.terminal.say("no batch was submitted yet")


@app.command("show")
@with_option_groups
def show(
    context: typer.Context,
    *,
    batch_id: BatchId,
    gateway: GatewayOptions,
    as_json: Json = False,
) -> None:
    """All that is known of one batch."""
    here = session(context)
    batch = here.client(*gateway).get(path_of(batch_id))
    if as_json:
        here.terminal.json(batch)
        return
    here.terminal.table(["figure", "value"], [[name, plain(name, value)] for name, value in batch.items()])


@app.command("cancel")
@with_option_groups
def cancel(
    context: typer.Context,
    *,
    batch_id: BatchId,
    gateway: GatewayOptions,
    as_json: Json = False,
) -> None:
    """End a batch. What it has answered can be fetched."""
    here = session(context)
    batch = here.client(*gateway).post(f"{path_of(batch_id)}/cancel", {})
    if as_json:
        here.terminal.json(batch)
    else:
        here.terminal.say(f"{batch['id']} is {batch['status']}")


@app.command("fetch")
@with_option_groups
def fetch(
    context: typer.Context,
    *,
    batch_id: BatchId,
    output: Output = None,
    wait: Annotated[bool, typer.Option("--wait", help="Until it is over, as mico batch run does.")] = False,
    gateway: GatewayOptions,
    as_json: Json = False,
) -> None:
    """Write the answers of a batch that is over to a file."""
    here = session(context)
    client = here.client(*gateway)
    target = output or Path(f"{batch_id}.out.jsonl")
    make_way(target)
    batch = client.get(path_of(batch_id))
    if not wait and batch["status"] not in ENDED:
        raise CommandFailed(f"{batch_id} is {batch['status']}", tip="--wait waits until it is over")
    finish(here, client, batch_id, target, as_json)


def path_of(batch_id: str) -> str:
    """Without an id it would be that of all batches."""
    from urllib.parse import quote

    if not batch_id:
        tip = "mico batch list shows the ids"
        raise CommandFailed("no batch is named", tip=tip, exit_code=ExitCode.WRONG_USAGE)
    return f"/v1/batches/{quote(batch_id, safe='')}"


def request_file(file: Path | None, source: Path | None) -> Path:
    """The one file that was named, in either way; it is there."""
    one = source if file is None else file
    if one is None or (file is not None and source is not None):
        tip = "mico batch run FILE -o ANSWERS"
        raise CommandFailed("name one file of requests", tip=tip, exit_code=ExitCode.WRONG_USAGE)
    if not one.is_file():
        raise CommandFailed(f"there is no file {one}", exit_code=ExitCode.WRONG_USAGE)
    return one


def beside(output: Path) -> Path:
    """Where errors go."""
    return output.with_name(f"{output.stem}.errors{output.suffix}")


def send(here: Session, client: Client, file: Path, endpoint: str) -> Batch:
    with here.terminal.spinner(f"uploading {file.name}, {file.stat().st_size:,} bytes"):
        uploaded = client.upload(file, "batch")
    asked = {"input_file_id": uploaded["id"], "endpoint": endpoint, "completion_window": "24h"}
    return client.post("/v1/batches", asked)


def finish(here: Session, client: Client, batch_id: str, output: Path, as_json: bool) -> None:
    """Wait, fetch, and leave with the exit status that says how it went."""
    try:
        batch = follow(here, client, batch_id)
    except KeyboardInterrupt:
        here.terminal.say(f"{batch_id} goes on without you. To wait for it and fetch its answers:")
        here.terminal.say(f"  mico batch fetch {batch_id} --wait -o {output}")
        raise typer.Exit(ExitCode.INTERRUPTED) from None
    if batch["status"] == "failed":
        raise not_a_batch(batch)
    written = {
        name: save(client, batch.get(f"{kind}_file_id"), path)
        for name, kind, path in (("output", "output", output), ("errors", "error", beside(output)))
    }
    report(here, batch, written, as_json)
    if batch["status"] != "completed" or batch["request_counts"]["failed"]:
        raise typer.Exit(ExitCode.PARTLY_FAILED)


def follow(here: Session, client: Client, batch_id: str) -> Batch:
    """The batch once it is over. A gateway that is away for a while is waited for."""
    from mico.progress import counting

    answered_s = time.monotonic()
    with counting(here.terminal) as tell:
        while True:
            try:
                batch = client.get(path_of(batch_id))
            except Away as away:
                if time.monotonic() - answered_s > AWAY_WITHIN_S:
                    raise CommandFailed(
                        away.error, cause=away.cause, tip=f"later: mico batch fetch {batch_id} --wait"
                    ) from away
                time.sleep(POLL_S)
                continue
            answered_s = time.monotonic()
            counts = batch["request_counts"]
            tell(batch["status"], counts["completed"], counts["failed"], counts["total"])
            if batch["status"] in ENDED:
                return batch
            time.sleep(POLL_S)


def save(client: Client, file_id: str | None, path: Path) -> str | None:
    if file_id is None:
        return None
    client.download(f"/v1/files/{file_id}/content", path)
    return str(path)


def report(here: Session, batch: Batch, written: Mapping[str, str | None], as_json: bool) -> None:
    if as_json:
        here.terminal.json({**batch, **{f"{name}_path": path for name, path in written.items()}})
        return
    counts = batch["request_counts"]
    here.terminal.say(
        f"{batch['id']} is {batch['status']}: {counts['completed']} of {several(counts['total'], 'line')}"
        f" answered, {several(counts['failed'], 'with an error', 'with errors')}"
    )
    for path in filter(None, written.values()):
        here.terminal.data(path)


def not_a_batch(batch: Batch) -> CommandFailed:
    faults = (batch.get("errors") or {}).get("data") or []
    told = [f"line {fault['line']}: " if fault.get("line") else "" for fault in faults]
    sentences = [lead + str(fault.get("message")) for lead, fault in zip(told, faults, strict=True)]
    more = len(sentences) - FAULTS_SHOWN
    cause = "\n       ".join([*sentences[:FAULTS_SHOWN], *([f"{more} more"] if more > 0 else [])])
    return CommandFailed("the file is no batch", cause=cause, tip=f"mico batch show {batch['id']} --json")


def row(batch: Batch) -> dict[str, str]:
    counts = batch["request_counts"]
    return {
        "batch": batch["id"],
        "status": batch["status"],
        "model": batch.get("model", "-"),
        "answered": f"{counts['completed']}/{counts['total']}",
        "with errors": str(counts["failed"]),
        "submitted": moment(batch["created_at"]),
        "expires": moment(batch["expires_at"]),
    }


def plain(name: str, value: object) -> str:
    if name.endswith("_at") and isinstance(value, int):
        return moment(value)
    if isinstance(value, dict):
        return ", ".join(f"{key} {part}" for key, part in value.items())
    return str(value)


def moment(unix_s: int) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="seconds")
