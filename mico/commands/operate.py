"""`mico sites drain | pause | resume | weight | pin-off | unpin`: the acts of the page, by the same API."""

from __future__ import annotations

import re
import sys
from typing import Annotated, Any

import typer

from gateway.wording import several
from mico.errors import CommandFailed, ExitCode
from mico.session import ApiKey, BaseUrl, Json, Session, session
from mico.terminal import seconds

SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
LONGEST_S = 36_500 * 86_400

Name = Annotated[str, typer.Argument(help="As in mico sites list.")]
Reason = Annotated[str, typer.Option(help="Why. Everyone sees it, and the audit keeps it.")]
For = Annotated[str | None, typer.Option("--for", help="Ends by itself after 90s, 30m, 2h, 1d.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do it even where it hurts.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what it would do.")]


def drain(
    context: typer.Context,
    *,
    name: Name,
    reason: Reason = "",
    lasts: For = None,
    yes: Yes = False,
    dry_run: DryRun = False,
    base_url: BaseUrl = None,
    api_key: ApiKey = None,
    as_json: Json = False,
) -> None:
    """No new queries there; what runs finishes."""
    body = {"reason": reason, "for_s": ends_after(lasts)}
    act(session(context), (base_url, api_key), name, "drain", body, yes=yes, dry_run=dry_run, as_json=as_json)


def pause(
    context: typer.Context,
    *,
    name: Name,
    reason: Reason = "",
    within: Annotated[str, typer.Option(help="What still runs after this long moves elsewhere.")] = "60s",
    lasts: For = None,
    yes: Yes = False,
    dry_run: DryRun = False,
    base_url: BaseUrl = None,
    api_key: ApiKey = None,
    as_json: Json = False,
) -> None:
    """Drain with a deadline: what still runs then moves to other sites."""
    body = {"reason": reason, "for_s": ends_after(lasts), "within_s": duration(within)}
    act(session(context), (base_url, api_key), name, "pause", body, yes=yes, dry_run=dry_run, as_json=as_json)


def resume(
    context: typer.Context,
    *,
    name: Name,
    reason: Reason = "",
    dry_run: DryRun = False,
    base_url: BaseUrl = None,
    api_key: ApiKey = None,
    as_json: Json = False,
) -> None:
    """Take queries there again."""
    body = {"reason": reason}
    act(session(context), (base_url, api_key), name, "resume", body, dry_run=dry_run, as_json=as_json)


def weight(
    context: typer.Context,
    *,
    name: Name,
    percent: Annotated[float, typer.Argument(min=0, max=100, help="Of its usual part; 100 is normal.")],
    reason: Reason = "",
    lasts: For = None,
    yes: Yes = False,
    dry_run: DryRun = False,
    base_url: BaseUrl = None,
    api_key: ApiKey = None,
    as_json: Json = False,
) -> None:
    """Give a site a smaller part of the queries."""
    body = {"reason": reason, "for_s": ends_after(lasts), "weight": percent}
    act(
        session(context), (base_url, api_key), name, "weight", body, yes=yes, dry_run=dry_run, as_json=as_json
    )


def pin_off(
    context: typer.Context,
    *,
    name: Name,
    model: Annotated[str, typer.Argument(help="The model that gets no new queries there.")],
    reason: Reason = "",
    lasts: For = None,
    yes: Yes = False,
    dry_run: DryRun = False,
    base_url: BaseUrl = None,
    api_key: ApiKey = None,
    as_json: Json = False,
) -> None:
    """Take one model off a site."""
    body = {"reason": reason, "for_s": ends_after(lasts), "model": model}
    where = (base_url, api_key)
    act(session(context), where, name, "pin-off", body, yes=yes, dry_run=dry_run, as_json=as_json)


def unpin(
    context: typer.Context,
    *,
    name: Name,
    model: Annotated[str, typer.Argument(help="The model to put back.")],
    reason: Reason = "",
    base_url: BaseUrl = None,
    api_key: ApiKey = None,
    as_json: Json = False,
) -> None:
    """Put a model back on a site."""
    act(
        session(context),
        (base_url, api_key),
        name,
        "unpin",
        {"reason": reason, "model": model},
        as_json=as_json,
    )


def act(
    here: Session,
    gateway: tuple[str | None, str | None],
    site: str,
    verb: str,
    body: dict[str, Any],
    *,
    yes: bool = False,
    dry_run: bool = False,
    as_json: bool = False,
) -> None:
    """The numbers first; then, unless they hurt and nobody says yes, the act."""
    from urllib.parse import quote

    client, path = here.client(*gateway), f"/admin/api/sites/{quote(site, safe='')}/{verb}"
    if not body["reason"] and not dry_run:
        raise CommandFailed("an act needs a reason", tip="--reason WHY", exit_code=ExitCode.WRONG_USAGE)
    answer = client.post(path, {**body, "dry_run": True})
    if not dry_run:
        confirm(here, answer["preview"]["warnings"], yes=yes)
        answer = client.post(path, body)
    if as_json:
        here.terminal.json(answer)
    else:
        tell(here, answer)


def confirm(here: Session, warnings: list[str], *, yes: bool) -> None:
    for warning in warnings:
        here.terminal.say(f"warning: {warning}")
    if not warnings or yes:
        return
    if not sys.stdin.isatty():
        raise CommandFailed("this would hurt, and nobody is here to say yes", tip="--yes does it anyway")
    if not typer.confirm("Do it?", err=True):
        raise CommandFailed("nothing was changed")


def tell(here: Session, answer: dict[str, Any]) -> None:
    preview = answer["preview"]
    here.terminal.say(("done: " if answer["done"] else "would do: ") + preview["text"])
    if preview["left"]:
        left = several(preview["left"], "query is", "queries are")
        here.terminal.say(f"{left} left there, empty in {seconds(preview['empty_in_s'])}")


def ends_after(text: str | None) -> float:
    """0 where nothing is said: until somebody says otherwise."""
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
    """90s, 30m, 2h or 1d in seconds."""
    found = re.fullmatch(r"(\d{1,12}(?:\.\d{1,12})?)([smhd]?)", text.strip(), re.ASCII)
    if not found:
        raise CommandFailed(
            f"{text!r} is no length of time", tip="such as 90s, 30m, 2h", exit_code=ExitCode.WRONG_USAGE
        )
    seconds = float(found[1]) * SECONDS[found[2] or "s"]
    if seconds > LONGEST_S:
        raise CommandFailed(f"{text} is too long", tip="at most 36500d", exit_code=ExitCode.WRONG_USAGE)
    return seconds
