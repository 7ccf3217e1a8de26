"""`mico top`: the federation in the terminal, a line per site, refreshed every second, with a few keys."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mico.errors import CommandFailed
from mico.options import GatewayOptions, Json, with_option_groups
from mico.session import session_of

if TYPE_CHECKING:
    from mico.client import Client
    from mico.keyboard import Keyboard
    from mico.top_state import TopState

OVERVIEW = "/admin/api/overview"
BATCHES = "/admin/api/batches?limit=20"
REFRESH_TIMEOUT_S = 5.0
"""No key is read during a request, so it is short."""


@with_option_groups
def top(
    context: typer.Context,
    *,
    times: Annotated[
        int | None, typer.Option("-n", min=1, help="Number of refreshes. [default: until you press q]")
    ] = None,
    every: Annotated[float, typer.Option(min=0.2, help="Seconds between refreshes.")] = 1.0,
    gateway: GatewayOptions,
    as_json: Json = False,
) -> None:
    """Show sites, batches and events; s sorts, d drains, p pauses, q quits. -n 1 --json is for scripts."""
    session = session_of(context)
    client = session.client(*gateway)
    if as_json:
        refreshes = 0
        while times is None or refreshes < times:
            if refreshes:
                time.sleep(every)
            session.terminal.json(client.get(OVERVIEW))
            refreshes += 1
        return
    from rich.console import Console

    from mico.top_view import render

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
    first = client.get(OVERVIEW)
    if times != 1 and console.is_terminal and sys.stdin.isatty():
        run_live(client, first, times, every)
        return
    console.print(render(first, newest_batches(client)))
    for _ in range((times or 1) - 1):
        time.sleep(every)
        console.print("", render(client.get(OVERVIEW), newest_batches(client)))


def newest_batches(client: Client) -> list[dict[str, Any]]:
    """Return the newest batches, or none: they are in the database, and sites are shown while it is away."""
    try:
        return [*client.get(BATCHES, timeout_s=REFRESH_TIMEOUT_S).objects("data")]
    except CommandFailed:
        return []


def run_live(client: Client, first: dict[str, Any], times: int | None, every_s: float) -> None:
    from rich.console import Console
    from rich.live import Live

    from mico.keyboard import keyboard
    from mico.top_state import TopState
    from mico.top_view import render_screen

    state = TopState(first, newest_batches(client))
    console = Console(highlight=False)
    try:
        with (
            keyboard() as keys,
            Live(render_screen(state, console), console=console, screen=True, auto_refresh=False) as display,
        ):
            refreshes = 1
            while not state.finished and (times is None or refreshes < times):
                until_s = time.monotonic() + every_s
                while not state.finished and (left_s := until_s - time.monotonic()) > 0:
                    handle_key(client, state, keys, left_s)
                    display.update(render_screen(state, console), refresh=True)
                refreshes += refresh(client, state)
                display.update(render_screen(state, console), refresh=True)
    except KeyboardInterrupt:
        return


def refresh(client: Client, state: TopState) -> int:
    """Fetch a new snapshot unless paused; return the number of refreshes, 0 or 1.

    A failure is shown, and the next refresh tries again.
    """
    if state.paused or state.finished:
        return 0
    try:
        state.snapshot = client.get(OVERVIEW, timeout_s=REFRESH_TIMEOUT_S)
        state.error, state.batches = "", newest_batches(client)
    except CommandFailed as failure:
        state.error = failure.error
    return 1


def handle_key(client: Client, state: TopState, keys: Keyboard, timeout_s: float) -> None:
    """Wait for a key up to `timeout_s`, apply it, and send the request that it leads to."""
    from urllib.parse import quote

    key = keys.read_key(timeout_s)
    request = state.press(key) if key else None
    if request is None:
        return
    path = f"/admin/api/sites/{quote(request.site, safe='')}/drain"
    try:
        state.show_answer(client.post(path, {"reason": request.reason, "dry_run": request.dry_run}))
    except CommandFailed as failure:
        state.show_refusal(failure.cause or failure.error)
