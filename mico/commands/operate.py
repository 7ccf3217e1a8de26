"""`mico sites drain | pause | resume | weight | pin-off | unpin`: the dashboard's orders, by the same API."""

from __future__ import annotations

import re
import sys
from typing import Annotated, Any

import typer

from gateway.wording import several
from mico.errors import CommandFailed, ExitCode
from mico.options import DryRun, GatewayOptions, Json, OrderOptions, SiteName, with_option_groups
from mico.session import Session, session_of
from mico.terminal import format_seconds

UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
MAX_DURATION_S = 36_500 * 86_400

Reason = Annotated[str, typer.Option(help="The reason, shown to everyone and kept by the audit.")]


@with_option_groups
def drain(
    context: typer.Context,
    name: SiteName,
    *,
    reason: Reason = "",
    order: OrderOptions,
    gateway: GatewayOptions,
    as_json: Json = False,
) -> None:
    """Send no new queries; running ones finish."""
    body = {"reason": reason, "for_s": ends_after(order.lasts)}
    send_order(session_of(context), gateway, name, "drain", body, order=order, as_json=as_json)


@with_option_groups
def pause(
    context: typer.Context,
    name: SiteName,
    *,
    reason: Reason = "",
    within: Annotated[
        str, typer.Option(help="Queries that still run after this time move elsewhere.")
    ] = "60s",
    order: OrderOptions,
    gateway: GatewayOptions,
    as_json: Json = False,
) -> None:
    """Drain with a deadline: queries that still run then move to other sites."""
    body = {"reason": reason, "for_s": ends_after(order.lasts), "within_s": duration(within)}
    send_order(session_of(context), gateway, name, "pause", body, order=order, as_json=as_json)


@with_option_groups
def resume(
    context: typer.Context,
    name: SiteName,
    *,
    reason: Reason = "",
    dry_run: DryRun = False,
    gateway: GatewayOptions,
    as_json: Json = False,
) -> None:
    """Send queries to a site again."""
    order = OrderOptions(dry_run=dry_run)
    send_order(session_of(context), gateway, name, "resume", {"reason": reason}, order=order, as_json=as_json)


@with_option_groups
def weight(
    context: typer.Context,
    name: SiteName,
    *,
    percent: Annotated[
        float, typer.Argument(min=0, max=100, help="Share of its usual queries; 100 is normal.")
    ],
    reason: Reason = "",
    order: OrderOptions,
    gateway: GatewayOptions,
    as_json: Json = False,
) -> None:
    """Give a site a smaller share of the queries."""
    body = {"reason": reason, "for_s": ends_after(order.lasts), "weight": percent}
    send_order(session_of(context), gateway, name, "weight", body, order=order, as_json=as_json)


@with_option_groups
def pin_off(
    context: typer.Context,
    name: SiteName,
    *,
    model: Annotated[str, typer.Argument(help="The model that gets no new queries there.")],
    reason: Reason = "",
    order: OrderOptions,
    gateway: GatewayOptions,
    as_json: Json = False,
) -> None:
    """Take one model off a site."""
    body = {"reason": reason, "for_s": ends_after(order.lasts), "model": model}
    send_order(session_of(context), gateway, name, "pin-off", body, order=order, as_json=as_json)


@with_option_groups
def unpin(
    context: typer.Context,
    name: SiteName,
    *,
    model: Annotated[str, typer.Argument(help="The model to put back.")],
    reason: Reason = "",
    gateway: GatewayOptions,
    as_json: Json = False,
) -> None:
    """Put a model back on a site."""
    body = {"reason": reason, "model": model}
    send_order(session_of(context), gateway, name, "unpin", body, order=OrderOptions(), as_json=as_json)


def send_order(
    session: Session,
    gateway: GatewayOptions,
    site: str,
    verb: str,
    body: dict[str, Any],
    *,
    order: OrderOptions,
    as_json: bool,
) -> None:
    """Preview the order; then carry it out, unless its warnings are not accepted. Raises CommandFailed."""
    from urllib.parse import quote

    client, path = session.client(*gateway), f"/admin/api/sites/{quote(site, safe='')}/{verb}"
    if not order.dry_run:
        needed(body["reason"])
    answer = client.post(path, {**body, "dry_run": True})
    if not order.dry_run:
        confirm(session, answer["preview"]["warnings"], yes=order.yes)
        answer = client.post(path, body)
    if as_json:
        session.terminal.json(answer)
    else:
        print_answer(session, answer)


def needed(reason: str) -> str:
    """Return the reason. Raises CommandFailed where none was given."""
    if not reason:
        raise CommandFailed("an act needs a reason", tip="--reason WHY", exit_code=ExitCode.WRONG_USAGE)
    return reason


def confirm(session: Session, warnings: list[str], *, yes: bool) -> None:
    for warning in warnings:
        session.terminal.info(f"warning: {warning}")
    if not warnings or yes:
        return
    if not sys.stdin.isatty():
        raise CommandFailed("this would hurt, and nobody is here to say yes", tip="--yes does it anyway")
    if not typer.confirm("Do it?", err=True):
        raise CommandFailed("nothing was changed")


def print_answer(session: Session, answer: dict[str, Any]) -> None:
    preview = answer["preview"]
    session.terminal.info(("done: " if answer["done"] else "would do: ") + preview["text"])
    if preview["left"]:
        left = several(preview["left"], "query is", "queries are")
        session.terminal.info(f"{left} left there, empty in {format_seconds(preview['empty_in_s'])}")


def ends_after(text: str | None) -> float:
    """Return the duration of an order in seconds; 0 without a text: until another order."""
    if text is None:
        return 0.0
    seconds = duration(text)
    if seconds <= 0.0:
        raise CommandFailed(
            f"--for {text} is no time at all",
            tip="such as 90s, 30m, 2h; without --for it holds until it is undone",
            exit_code=ExitCode.WRONG_USAGE,
        )
    return seconds


def duration(text: str) -> float:
    """Return 90s, 30m, 2h or 1d in seconds. Raises CommandFailed for another text."""
    found = re.fullmatch(r"(\d{1,12}(?:\.\d{1,12})?)([smhd]?)", text.strip(), re.ASCII)
    if not found:
        raise CommandFailed(
            f"{text!r} is no length of time", tip="such as 90s, 30m, 2h", exit_code=ExitCode.WRONG_USAGE
        )
    seconds = float(found[1]) * UNIT_SECONDS[found[2] or "s"]
    if seconds > MAX_DURATION_S:
        raise CommandFailed(f"{text} is too long", tip="at most 36500d", exit_code=ExitCode.WRONG_USAGE)
    return seconds
