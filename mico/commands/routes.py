"""`mico routes …`: names that stand for models, by the gateway's admin API."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from mico.commands.keys import format_time
from mico.commands.operate import Reason, needed
from mico.errors import CommandFailed, ExitCode
from mico.options import GatewayOptions, Json, with_option_groups
from mico.session import Session, session_of

PATH = "/admin/api/routes"
TARGET_FIELDS: dict[str, type] = {"weight": float, "when": str, "slower_than_s": float}
SHADOW_FIELDS: dict[str, type] = {"share": float}

app = typer.Typer(help="Names that stand for models: aliases, fallbacks, canaries.", no_args_is_help=True)
Name = Annotated[str, typer.Argument(help="The name that clients ask for.")]


@app.command("list")
@with_option_groups
def list_routes(context: typer.Context, *, gateway: GatewayOptions, as_json: Json = False) -> None:
    """List every route with its targets in order."""
    session = session_of(context)
    routes = session.client(*gateway).get(PATH).objects("routes")
    if as_json:
        session.terminal.json(routes)
    elif routes:
        rows = [
            [each["name"], ", ".join(map(target_text, each["targets"])), shadow_text(each), each["source"]]
            for each in routes
        ]
        session.terminal.table(["route", "targets", "shadow", "set by"], rows)
    else:
        session.terminal.info("no name stands for a model")


@app.command("show")
@with_option_groups
def show_route(context: typer.Context, name: Name, *, gateway: GatewayOptions, as_json: Json = False) -> None:
    """Show one route, who set it and why."""
    session = session_of(context)
    routes = session.client(*gateway).get(PATH).objects("routes")
    route = next((each for each in routes if each["name"] == name), None)
    if route is None:
        names = ", ".join(each["name"] for each in routes) or "none"
        raise CommandFailed(f"there is no route {name}", tip=f"routes now: {names}")
    if as_json:
        session.terminal.json(route)
        return
    print_route(session, route)
    print_figures(session, route["figures"])
    if route["source"] == "operator":
        session.terminal.info(
            f"set by {route['who']} at {format_time(route['changed_at'])}: {route['reason']}"
        )
    else:
        session.terminal.info("of the gateway's file")


@app.command("set")
@with_option_groups
def set_route(
    context: typer.Context,
    name: Name,
    *,
    to: Annotated[
        list[str],
        typer.Option(
            help="MODEL[,weight=N][,when=always|unavailable|overloaded|slower_than][,slower_than_s=S];"
            " repeatable, in the order in which they stand in."
        ),
    ],
    shadow: Annotated[
        str | None, typer.Option(help="MODEL,share=0.05: gets a copy of this share of the queries.")
    ] = None,
    reason: Reason = "",
    gateway: GatewayOptions,
    as_json: Json = False,
) -> None:
    """Set the targets of a name; what was set before is replaced."""
    body = {
        "name": name,
        "targets": [parse(each, TARGET_FIELDS) for each in to],
        "shadow": parse(shadow, SHADOW_FIELDS) if shadow else None,
        "reason": needed(reason),
    }
    session = session_of(context)
    route = session.client(*gateway).post(PATH, body)
    if as_json:
        session.terminal.json(route)
        return
    print_route(session, route)
    if unserved := [each["model"] for each in route["targets"] if not each["served"]]:
        session.terminal.info(f"no site serves now: {', '.join(unserved)}")


@app.command("off")
@with_option_groups
def take_out(
    context: typer.Context,
    model: Annotated[str, typer.Argument(help="A target, such as a canary, or a shadow.")],
    *,
    route: Annotated[str | None, typer.Option(help="Only of this route; else of every one.")] = None,
    reason: Reason = "",
    gateway: GatewayOptions,
    as_json: Json = False,
) -> None:
    """Take a model out of the routes at once: it gets no new queries by them."""
    session = session_of(context)
    body = {"model": model, "name": route, "reason": needed(reason)}
    changed = session.client(*gateway).post(f"{PATH}/off", body).objects("routes")
    if as_json:
        session.terminal.json(changed)
        return
    for each in changed:
        print_route(session, each)


@app.command("remove")
@with_option_groups
def remove_route(
    context: typer.Context,
    name: Name,
    *,
    reason: Reason = "",
    gateway: GatewayOptions,
    as_json: Json = False,
) -> None:
    """Remove a route. That of the gateway's file holds again, if it has one of the name."""
    session = session_of(context)
    left = session.client(*gateway).post(f"{PATH}/remove", {"name": name, "reason": needed(reason)})
    if as_json:
        session.terminal.json(left)
    elif left["targets"]:
        session.terminal.info(f"{name} is again what the gateway's file says")
        print_route(session, left)
    else:
        session.terminal.info(f"{name} stands for no other model any more")


def print_route(session: Session, route: dict[str, Any]) -> None:
    session.terminal.table(
        ["route", "target", "gets", "served"],
        [
            [route["name"], each["model"], gets_text(each), "yes" if each["served"] else "no"]
            for each in route["targets"]
        ],
    )
    if route["shadow"]:
        session.terminal.info(f"shadow: {shadow_text(route)}")


def print_figures(session: Session, figures: list[dict[str, Any]]) -> None:
    rows = [
        [
            f"{each['model']} (shadow)" if each["is_shadow"] else each["model"],
            str(each["queries"]),
            "-" if each["is_shadow"] else f"{each['share']:.1%}",
            str(each["failed"]),
            str(each["skipped"]) if each["is_shadow"] else "-",
            beside(each["tokens_p50"], each["user_tokens_p50"], "{:.0f}"),
            beside(each["seconds_p50"], each["user_seconds_p50"], "{:.2f} s"),
        ]
        for each in figures
    ]
    session.terminal.table(["model", "queries", "share", "errors", "skipped", "tokens p50", "time p50"], rows)


def beside(value: float | None, user: float | None, form: str) -> str:
    """Return a median, of a shadow beside that of the answers which it copied."""
    if value is None:
        return "-"
    return form.format(value) if user is None else f"{form.format(value)} beside {form.format(user)}"


def target_text(target: dict[str, Any]) -> str:
    return f"{target['model']} {gets_text(target)}"


def gets_text(target: dict[str, Any]) -> str:
    """Return when a target takes queries, in words."""
    if target["weight"] <= 0:
        return "off"
    if target["when"] == "always":
        return f"weight {target['weight']:g}"
    seconds = f" {target['slower_than_s']:g} s" if target["when"] == "slower_than" else ""
    return f"if {target['when'].replace('_', ' ')}{seconds}"


def shadow_text(route: dict[str, Any]) -> str:
    shadow = route["shadow"]
    return f"{shadow['model']}, {shadow['share']:.3g} of the queries" if shadow else "none"


def parse(text: str, fields: dict[str, type]) -> dict[str, Any]:
    """Return MODEL,field=value,… as a body has it. A model's name may have commas. Raises CommandFailed."""
    model, found = text, dict[str, Any]()
    while (parts := model.rpartition(","))[1]:
        field, equals, value = parts[2].partition("=")
        if not equals:
            break
        if field not in fields:  # else a slip such as wieght=5 would become part of the model's name
            raise CommandFailed(
                f"{field!r} is not known",
                cause=f"of {text!r}",
                tip=f"behind the model: {', '.join(f'{each}=…' for each in fields)}",
                exit_code=ExitCode.WRONG_USAGE,
            )
        try:
            found[field] = fields[field](value)
        except ValueError as error:
            raise CommandFailed(
                f"{field} is {value!r}, no number", tip=f"of {text!r}", exit_code=ExitCode.WRONG_USAGE
            ) from error
        model = parts[0]
    return {"model": model, **found}
