"""`mico top`: the federation in the terminal, a line a site, once a second."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mico.session import ApiKey, BaseUrl, Json, session
from mico.terminal import STATE_COLOURS, seconds

if TYPE_CHECKING:
    from rich.console import RenderableType

LEVELS = {"calm": "green", "degraded": "yellow", "critical": "bold red"}
EVENTS_SHOWN = 6


def top(
    context: typer.Context,
    *,
    times: Annotated[
        int | None, typer.Option("-n", min=1, help="How often; without it until Ctrl-C.")
    ] = None,
    every: Annotated[float, typer.Option(min=0.2, help="Seconds between two looks.")] = 1.0,
    base_url: BaseUrl = None,
    api_key: ApiKey = None,
    as_json: Json = False,
) -> None:
    """Sites, load and events, live. -n 1 --json is for scripts."""
    here = session(context)
    client = here.client(base_url, api_key)
    looked = 0
    if as_json:
        while times is None or looked < times:
            looked += _rest(looked, every)
            here.terminal.json(client.get("/admin/api/overview"))
        return
    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
    first = client.get("/admin/api/overview")
    if times == 1 or not console.is_terminal:
        console.print(screen(first))
        return
    with Live(screen(first), console=console, screen=True, auto_refresh=False) as live:
        looked = 1
        try:
            while times is None or looked < times:
                looked += _rest(looked, every)
                live.update(screen(client.get("/admin/api/overview")), refresh=True)
        except KeyboardInterrupt:
            return


def _rest(looked: int, every_s: float) -> int:
    """One look more; before every one but the first there is a rest."""
    if looked:
        time.sleep(every_s)
    return 1


def screen(snapshot: dict[str, Any]) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    banner = snapshot["banner"]
    events = [event_line(event) for event in snapshot["events"][:EVENTS_SHOWN]]
    return Group(
        Text(banner["text"], style=LEVELS[banner["level"]]),
        Text(totals_line(snapshot["totals"]), style="dim"),
        "",
        site_table(snapshot["sites"]),
        "",
        *events,
    )


def totals_line(totals: dict[str, Any]) -> str:
    return (
        f"out {totals['output_per_s']:.0f} tok/s · in {totals['input_per_s']:.0f} tok/s · "
        f"{totals['in_flight']} in flight · {totals['queued']} queued · "
        f"first token p95 {seconds(totals['ttft_p95_s'])} · "
        f"{totals['errors_per_min']:.0f} of {totals['ended_per_min']:.0f} failed in the last minute · "
        f"headroom {percent(totals['headroom'])}"
    )


def site_table(sites: list[dict[str, Any]]) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("site", "state", "token load", "", "weight", "out/s", "run", "queue"):
        table.add_column(
            column, justify="right" if column in ("", "weight", "out/s", "run", "queue") else "left"
        )
    for column in ("TTFT p95", "token p95", "KV", "err/min", "report"):
        table.add_column(column, justify="right")
    for site in sites:
        unknown = "dim strike" if site["state"] == "stale" else ""
        cells = [
            bar(site["load"]),
            percent(site["load"]),
            f"{site['weight']:.0f}",
            f"{site['output_per_s']:.0f}",
            f"{site['running']}/{site['slots']}",
            str(site["pending"]),
            seconds(site["ttft_p95_s"]),
            seconds(site["itl_p95_s"]),
            percent(site["kv_used"]),
            f"{site['errors_per_min']:.0f}",
        ]
        state = Text(site["state"], style=STATE_COLOURS.get(site["state"], "red"))
        figures = [Text(cell, style=unknown) for cell in cells]
        table.add_row(site["name"], state, *figures, seconds(site["report_age_s"]))
    return table


def event_line(event: dict[str, Any]) -> RenderableType:
    from datetime import UTC, datetime

    from rich.text import Text

    when = datetime.fromtimestamp(event["at"], UTC).astimezone().strftime("%H:%M:%S")
    who = f" by {event['who']}" if event["who"] else ""
    text = f"{when} {event['kind']:<8} {event['site']} {event['text']}{who}"
    return Text(text, style="red" if event["bad"] else "dim")


def bar(load: float | None, width: int = 12) -> str:
    if load is None:
        return "·" * width
    filled = min(width, round(load * width))
    return "█" * filled + "░" * (width - filled)


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
