"""`mico tune …`: jobs that train a LoRA adapter of a model at the sites that serve it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer

from gateway.tuning.values import Target
from mico.commands.batch import format_unix_time
from mico.errors import CommandFailed, ExitCode
from mico.options import GatewayOptions, Json, with_option_groups
from mico.session import session_of

app = typer.Typer(
    help="Fine-tune a model: train an adapter at the sites that serve it.", no_args_is_help=True
)

Job = dict[str, Any]
JOBS = "/v1/fine_tuning/jobs"
MAX_EVENTS = 1_000

JobId = Annotated[str, typer.Argument(metavar="ID", help="A job id, as in mico tune list.")]
Rows = Annotated[
    Path,
    typer.Argument(metavar="FILE", help="JSON lines: chats with their answers, or prompt and completion."),
]
BaseModel = Annotated[str, typer.Option("--model", help="The base to train an adapter of.")]


@app.command("create")
@with_option_groups
def create(
    context: typer.Context,
    *,
    file: Rows,
    model: BaseModel,
    valid: Annotated[Path | None, typer.Option(help="A file of rows to measure on, not to learn.")] = None,
    suffix: Annotated[str, typer.Option(help="A part of the tuned model's name.")] = "",
    epochs: Annotated[int | None, typer.Option(min=1, help="Times to read the file; 3 unless given.")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Rows of a step; 16 unless given.")] = None,
    learning_rate: Annotated[
        float | None, typer.Option(help="Multiplies the learning rate of 0.0002.")
    ] = None,
    rank: Annotated[int | None, typer.Option(min=1, help="Rank of the adapter; 16 unless given.")] = None,
    target: Annotated[Target, typer.Option(help="The layers that get an adapter.")] = Target.ALL_LINEAR,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Of the order of the rows and the first weights.")
    ] = None,
    gateway: GatewayOptions,
    as_json: Json = False,
) -> None:
    """Upload a file and create a job; print its id."""
    session = session_of(context)
    client = session.client(*gateway)
    for each in filter(None, (file, valid)):
        if not each.is_file():
            raise CommandFailed(f"there is no file {each}", exit_code=ExitCode.WRONG_USAGE)
    hyperparameters = {
        "n_epochs": epochs,
        "batch_size": batch_size,
        "learning_rate_multiplier": learning_rate,
    }
    body: dict[str, Any] = {
        "model": model,
        "suffix": suffix or None,
        "seed": seed,
        "method": {"type": "supervised", "supervised": {"hyperparameters": hyperparameters}},
        "mico": {"rank": rank, "target": target.value},
    }
    with client.uploads("fine-tune") as upload:
        body["training_file"] = upload(file)
        if valid is not None:
            body["validation_file"] = upload(valid)
        job = client.post(JOBS, body)
    if as_json:
        session.terminal.json(job)
    else:
        session.terminal.data(job["id"])


@app.command("list")
@with_option_groups
def list_jobs(
    context: typer.Context,
    *,
    limit: Annotated[int, typer.Option(min=1, max=100, help="Maximum number of entries, newest first.")] = 20,
    gateway: GatewayOptions,
    as_json: Json = False,
) -> None:
    """List the newest jobs and their progress."""
    session = session_of(context)
    found = session.client(*gateway).get(f"{JOBS}?limit={limit}").objects("data")
    session.terminal.listing(found, table_row, "no job was created yet", as_json=as_json)


@app.command("show")
@with_option_groups
def show(context: typer.Context, *, job_id: JobId, gateway: GatewayOptions, as_json: Json = False) -> None:
    """Show everything about one job."""
    session = session_of(context)
    job = session.client(*gateway).get(path_of(job_id))
    if as_json:
        session.terminal.json(job)
        return
    fields = {name: value for name, value in job.items() if value not in (None, [], {}, "")}
    session.terminal.table(["figure", "value"], [[name, shown(name, each)] for name, each in fields.items()])


@app.command("events")
@with_option_groups
def events(
    context: typer.Context,
    *,
    job_id: JobId,
    limit: Annotated[int, typer.Option(min=1, max=MAX_EVENTS, help="Maximum number, of the newest.")] = 100,
    gateway: GatewayOptions,
    as_json: Json = False,
) -> None:
    """Show what has happened to a job, the oldest first: each fault of its files, each step, each site."""
    session = session_of(context)
    found = session.client(*gateway).get(f"{path_of(job_id)}/events?limit={limit}").objects("data")
    found.reverse()
    if as_json:
        session.terminal.json(found)
        return
    for each in found:
        session.terminal.data(f"{format_unix_time(each['created_at'])} {each['level']}: {each['message']}")


@app.command("cancel")
@with_option_groups
def cancel(context: typer.Context, *, job_id: JobId, gateway: GatewayOptions, as_json: Json = False) -> None:
    """End a job. Its checkpoints are kept; what was trained is paid for."""
    turn(context, job_id, "cancel", gateway, as_json)


@app.command("pause")
@with_option_groups
def pause(context: typer.Context, *, job_id: JobId, gateway: GatewayOptions, as_json: Json = False) -> None:
    """Have the site store a snapshot and stop. The job waits until it is resumed."""
    turn(context, job_id, "pause", gateway, as_json)


@app.command("resume")
@with_option_groups
def resume(context: typer.Context, *, job_id: JobId, gateway: GatewayOptions, as_json: Json = False) -> None:
    """Let a paused job go on from its last snapshot."""
    turn(context, job_id, "resume", gateway, as_json)


def turn(context: typer.Context, job_id: str, verb: str, gateway: GatewayOptions, as_json: bool) -> None:
    session = session_of(context)
    job = session.client(*gateway).post(f"{path_of(job_id)}/{verb}", {})
    if as_json:
        session.terminal.json(job)
    else:
        session.terminal.info(f"{job['id']} is {status_of(job)}")


def path_of(job_id: str) -> str:
    """Return the path of a job. Raises CommandFailed for an empty id, whose path is that of all jobs."""
    if not job_id:
        tip = "mico tune list shows the ids"
        raise CommandFailed("no job is named", tip=tip, exit_code=ExitCode.WRONG_USAGE)
    return f"{JOBS}/{quote(job_id, safe='')}"


def status_of(job: Job) -> str:
    """Return the status as people know it: OpenAI's clients know no paused job."""
    return "paused" if job["mico"]["paused"] else str(job["status"])


def table_row(job: Job) -> dict[str, str]:
    progress = job["mico"]
    return {
        "job": job["id"],
        "status": status_of(job),
        "model": job["model"],
        "steps": f"{progress['step']}/{progress['total_steps']}",
        "trained tokens": f"{progress['trained_tokens']:,}",
        "site": progress["site"] or "-",
        "created": format_unix_time(job["created_at"]),
    }


def shown(name: str, value: object) -> str:
    if name.endswith("_at") and isinstance(value, int):
        return format_unix_time(value)
    if isinstance(value, dict):
        return ", ".join(f"{key} {part}" for key, part in value.items() if part not in (None, ""))
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
