"""`mico config show`: each client setting, its value, and where that came from."""

from __future__ import annotations

import typer

from mico.options import Json
from mico.session import session
from mico.settings import SETTINGS

app = typer.Typer(help="Settings.", no_args_is_help=True)


@app.command("show")
def show(context: typer.Context, as_json: Json = False) -> None:
    """Flag, then environment, then mico.toml, then what runs here, then the default. Secrets are hidden."""
    here = session(context)
    resolved = {name: here.settings.resolve(name) for name in SETTINGS}
    if as_json:
        here.terminal.json(
            {name: {"value": each.shown, "origin": each.origin} for name, each in resolved.items()}
        )
        return
    rows = [
        [name, each.shown, each.origin, ", ".join(each.setting.variables)] for name, each in resolved.items()
    ]
    here.terminal.table(["setting", "value", "from", "variables"], rows)
