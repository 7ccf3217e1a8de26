"""`mico adapters …`: the tuned models of a tenant."""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import quote

import typer

from mico.commands.batch import format_unix_time
from mico.errors import CommandFailed, ExitCode
from mico.options import GatewayOptions, Json, with_option_groups
from mico.session import session_of

app = typer.Typer(help="The adapters that jobs of fine-tuning have made.", no_args_is_help=True)


@app.command("list")
@with_option_groups
def list_adapters(context: typer.Context, *, gateway: GatewayOptions, as_json: Json = False) -> None:
    """List tuned models and checkpoints, and whether a site serves them now."""
    session = session_of(context)
    found = session.client(*gateway).get("/v1/fine_tuning/models").objects("data")
    nothing = "there is no adapter yet: mico tune create makes one"
    session.terminal.listing(found, table_row, nothing, as_json=as_json)


def table_row(adapter: dict[str, Any]) -> dict[str, object]:
    return {
        "adapter": adapter["id"],
        "base": adapter["model"],
        "rank": adapter["rank"],
        "step": adapter["step_number"],
        "bytes": f"{adapter['bytes']:,}",
        "served": "yes" if adapter["served"] else "no",
        "created": format_unix_time(adapter["created_at"]),
    }


@app.command("remove")
@with_option_groups
def remove(
    context: typer.Context,
    *,
    name: Annotated[str, typer.Argument(metavar="NAME", help="A tuned model, as in mico adapters list.")],
    gateway: GatewayOptions,
    as_json: Json = False,
) -> None:
    """Delete a tuned model for good; sites serve it no more."""
    session = session_of(context)
    if not name:
        tip = "mico adapters list shows the names"
        raise CommandFailed("no adapter is named", tip=tip, exit_code=ExitCode.WRONG_USAGE)
    answer = session.client(*gateway).delete(f"/v1/models/{quote(name, safe='')}")
    if as_json:
        session.terminal.json(answer)
    else:
        session.terminal.info(f"{name} is deleted")
