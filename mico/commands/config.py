"""`mico config show`: each client setting, its value and its origin."""

from __future__ import annotations

import typer

from mico.options import Json
from mico.session import session_of
from mico.settings import SETTINGS

app = typer.Typer(help="Settings.", no_args_is_help=True)


@app.command("show")
def show(context: typer.Context, as_json: Json = False) -> None:
    """Show settings and their origin: flag, environment, mico.toml, local federation or default.

    Secrets are hidden.
    """
    session = session_of(context)
    resolved = {name: session.settings.resolve(name) for name in SETTINGS}
    if as_json:
        session.terminal.json(
            {name: {"value": each.shown, "origin": each.origin} for name, each in resolved.items()}
        )
        return
    rows = [
        [name, each.shown, each.origin, ", ".join(each.setting.variables)] for name, each in resolved.items()
    ]
    session.terminal.table(["setting", "value", "from", "variables"], rows)
