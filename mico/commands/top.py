"""`mico top`: the federation in the terminal, a line a site, once a second, with a few keys."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mico.errors import CommandFailed
from mico.options import GatewayOptions, Json, with_option_groups
from mico.session import session

if TYPE_CHECKING:
    from mico.client import Client
    from mico.keyboard import Keyboard
    from mico.watching import Watching

OVERVIEW = "/admin/api/overview"
LOOK_S = 5.0
"""While it waits no key is heard."""


@with_option_groups
def top(
    context: typer.Context,
    *,
    times: Annotated[
        int | None, typer.Option("-n", min=1, help="How often; without it until you press q.")
    ] = None,
    every: Annotated[float, typer.Option(min=0.2, help="Seconds between two looks.")] = 1.0,
    gateway: GatewayOptions,
    as_json: Json = False,
) -> None:
    """Sites, load and events, live; s sorts, d drains, p pauses, q quits. -n 1 --json is for scripts."""
    here = session(context)
    client = here.client(*gateway)
    if as_json:
        looked = 0
        while times is None or looked < times:
            if looked:
                time.sleep(every)
            here.terminal.json(client.get(OVERVIEW))
            looked += 1
        return
    from rich.console import Console

    from mico.screen import screen

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
    first = client.get(OVERVIEW)
    if times != 1 and console.is_terminal and sys.stdin.isatty():
        live(client, first, times, every)
        return
    console.print(screen(first))
    for _ in range((times or 1) - 1):
        time.sleep(every)
        console.print("", screen(client.get(OVERVIEW)))


def live(client: Client, first: dict[str, Any], times: int | None, every_s: float) -> None:
    from rich.console import Console
    from rich.live import Live

    from mico.keyboard import keyboard
    from mico.screen import screen
    from mico.watching import Watching

    watching = Watching(first)
    console = Console(highlight=False)
    try:
        with (
            keyboard() as keys,
            Live(screen(first, watching), console=console, screen=True, auto_refresh=False) as shown,
        ):
            looked = 1
            while not watching.over and (times is None or looked < times):
                until_s = time.monotonic() + every_s
                while not watching.over and (left_s := until_s - time.monotonic()) > 0:
                    press(client, watching, keys, left_s)
                    shown.update(screen(watching.snapshot, watching), refresh=True)
                looked += look(client, watching)
                shown.update(screen(watching.snapshot, watching), refresh=True)
    except KeyboardInterrupt:
        return


def look(client: Client, watching: Watching) -> int:
    """While it is paused nothing new is drawn. A gateway that does not answer is told of, and tried again."""
    if watching.paused or watching.over:
        return 0
    try:
        watching.snapshot = client.get(OVERVIEW, within_s=LOOK_S)
        watching.trouble = ""
    except CommandFailed as failure:
        watching.trouble = failure.error
    return 1


def press(client: Client, watching: Watching, keys: Keyboard, within_s: float) -> None:
    """One key, if there is one; what it asks of the gateway is done here."""
    from urllib.parse import quote

    key = keys.key(within_s)
    asked = watching.press(key) if key else None
    if asked is None:
        return
    path = f"/admin/api/sites/{quote(asked.site, safe='')}/drain"
    try:
        watching.answered(client.post(path, {"reason": asked.reason, "dry_run": asked.dry_run}))
    except CommandFailed as failure:
        watching.refused(failure.cause or failure.error)
