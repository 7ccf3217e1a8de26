"""Render the screen of `mico top`: banner, totals, sites and devices, batches, latest events, and keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mico.terminal import STATE_COLOURS, format_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console, RenderableType

    from mico.top_state import TopState

LEVELS = {"calm": "green", "degraded": "yellow", "critical": "bold red"}
EVENTS_SHOWN = 6
BATCHES_SHOWN = 5
RUNNING = ("validating", "in_progress", "finalizing", "cancelling")


def render(
    snapshot: dict[str, Any],
    batches: Sequence[dict[str, Any]] = (),
    *,
    sites: list[dict[str, Any]] | None = None,
    selected: str = "",
) -> RenderableType:
    """Render a snapshot of the overview and the running batches. `sites` overrides the order of its sites."""
    from rich.console import Group
    from rich.text import Text

    banner = snapshot["banner"]
    return Group(
        Text(banner["text"], style=LEVELS[banner["level"]]),
        Text(totals_line(snapshot["totals"]), style="dim"),
        "",
        site_table(sites or snapshot["sites"], selected),
        "",
        *batch_lines(batches),
        *(event_line(event, snapshot["at"]) for event in snapshot["events"][:EVENTS_SHOWN]),
    )


def render_screen(state: TopState, console: Console) -> RenderableType:
    """Render the whole screen of a terminal. The footer, which contains prompts, is never truncated."""
    from rich.console import Group
    from rich.layout import Layout
    from rich.text import Text

    stale = [Text(f"STALE: {state.error}", style="bold red")] if state.error else []
    above = Group(*stale, render(state.snapshot, state.batches, sites=state.sites, selected=state.selected))
    below = Group("", *(Text(line, style="bold") for line in state.footer()))
    screen = Layout()
    screen.split_column(Layout(above), Layout(below, size=len(console.render_lines(below))))
    return screen


def totals_line(totals: dict[str, Any]) -> str:
    return (
        f"out {totals['output_per_s']:.0f} tok/s · in {totals['input_per_s']:.0f} tok/s · "
        f"{totals['in_flight']} in flight · {totals['queued']} queued · "
        f"first token p95 {format_seconds(totals['ttft_p95_s'])} · "
        f"{totals['errors_per_min']:.0f} of {totals['ended_per_min']:.0f} failed in the last minute · "
        f"headroom {percent(totals['headroom'])}"
    )


def site_table(sites: list[dict[str, Any]], selected: str) -> RenderableType:
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
            format_seconds(site["ttft_p95_s"]),
            format_seconds(site["itl_p95_s"]),
            percent(site["kv_used"]),
            f"{site['errors_per_min']:.0f}",
        ]
        state = Text(site["state"], style=STATE_COLOURS.get(site["state"], "red"))
        figures = [Text(cell, style=unknown) for cell in cells]
        reverse = "reverse" if site["name"] == selected else None
        table.add_row(site["name"], state, *figures, format_seconds(site["report_age_s"]), style=reverse)
        for device in site.get("devices", ()):  # older gateways do not report devices
            table.add_row(*device_row(device), style="dim")
    return table


def batch_lines(batches: Sequence[dict[str, Any]]) -> list[RenderableType]:
    """Return a line for each of the newest BATCHES_SHOWN running batches, and a trailing empty line."""
    from datetime import UTC, datetime

    from rich.text import Text

    lines = []
    for batch in [each for each in batches if each["status"] in RUNNING][:BATCHES_SHOWN]:
        counts, mico = batch["request_counts"], batch.get("mico", {})
        ended = counts["completed"] + counts["failed"]
        parts = [f"{batch['id']} of {batch['tenant']}: {batch['status']}, {ended} of {counts['total']} ended"]
        if "in_flight" in mico:
            parts.append(f"{mico['in_flight']} run")
        if mico.get("shared_prompt_share"):
            parts.append(f"{percent(mico['shared_prompt_share'])} of prompts shared")
        if "ends_at" in mico:
            ends = datetime.fromtimestamp(mico["ends_at"], UTC).astimezone()
            parts.append(f"ends about {ends.strftime('%a %H:%M')}")
        lines.append(Text(" · ".join(parts)))
    return [*lines, Text("")] if lines else []


def device_row(device: dict[str, Any]) -> list[RenderableType | str]:
    """Return the cells of a device's row, below the row of its site."""
    from rich.text import Text

    used = 1 - device["kv_free_tokens"] / device["kv_tokens"] if device["kv_tokens"] else None
    state = Text("lost", style="red") if device["lost"] else Text("serves")
    rows = [f"{device['running']}/{device['slots']}", str(device["pending"])]
    return [
        f"  {device['device']}",
        state,
        "",
        "",
        "",
        f"{device['tokens_per_s']:.0f}",
        *rows,
        "",
        "",
        percent(used),
    ]


def event_line(event: dict[str, Any], now: float) -> RenderableType:
    """Return the line of an event, with its date unless that is the date of `now`, a Unix time."""
    from datetime import UTC, datetime

    from rich.text import Text

    at, today = (datetime.fromtimestamp(each, UTC).astimezone() for each in (event["at"], now))
    when = at.strftime("%H:%M:%S" if at.date() == today.date() else "%d %b %H:%M:%S")
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
