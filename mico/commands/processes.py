"""`mico gateway` and `mico site`: one process each, as deployments run them."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from mico.errors import CommandFailed, ExitCode
from mico.local.processes import bound_log
from mico.options import Json
from mico.session import session_of
from mico.terminal import Terminal

if TYPE_CHECKING:
    from site_engine.plan import Plan

NO_PART_OF_PLANS = {"site": "unnamed", "gateways": ("unnamed:1",)}
"""Settings that a site needs to start, and its memory does not depend on."""
ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="A TOML file; the environment overrides it.")
]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", help="name=value, overrides file and environment; repeatable.")
]


def gateway(config: ConfigFile = None, overrides: Overrides = None) -> None:
    """Run one gateway: HTTP for clients, gRPC for sites. Shuts down gracefully on SIGTERM."""
    from site_engine.first_import import first_import

    bound_log()
    with first_import("gateway.app"):
        from gateway.config import ConfigError, load
        from gateway.store.errors import StoreError
        from gateway.workers import run

    try:
        status = run(load(config, os.environ, parse_overrides(overrides)))
    except ConfigError as error:
        raise CommandFailed(
            "the gateway can't start", cause=str(error), exit_code=ExitCode.WRONG_USAGE
        ) from error
    except StoreError as error:
        raise CommandFailed("the gateway can't start", cause=str(error)) from error
    raise typer.Exit(status)


sites = typer.Typer(
    help="Run one site: it loads its model, or finds its server, and dials the gateways until SIGTERM."
)


@sites.callback(invoke_without_command=True)
def site(
    context: typer.Context,
    config: ConfigFile = None,
    engine: Annotated[
        str | None, typer.Option(help="native, or openai: a server that runs already, at --url.")
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="URL of that server: vLLM, SGLang, TGI, llama.cpp …")
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Run one site: it loads its model, or finds its server, and dials the gateways until SIGTERM."""
    if context.invoked_subcommand:
        return
    bound_log()
    from site_engine.config_sources import load_groups
    from site_engine.engine.process_spawn import prestarted, spawn
    from site_engine.errors import ConfigError
    from site_engine.first_import import first_import

    try:
        loaded = load_groups(
            config, os.environ, **{"engine": engine, "url": url, **parse_overrides(overrides)}
        )
    except ConfigError as error:
        raise CommandFailed(
            "the site can't start", cause=str(error), exit_code=ExitCode.WRONG_USAGE
        ) from error
    separates = any(each.separates_engine for each in loaded)
    # A process that is started now imports torch while this one imports what a site needs.
    start = prestarted() if separates else spawn
    with first_import("site_engine.app"):
        from site_engine.app import run

    exit_at_once(run(loaded, start))


@sites.command("plan")
def plan_site(
    context: typer.Context,
    config: ConfigFile = None,
    gpus: Annotated[
        str, typer.Option(help="COUNTxNAME, such as H200, or COUNTxSIZEGiB; of a CPU the memory, as 64GiB.")
    ] = "H200",
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Plan a site's memory from the headers of its files: shared, own, KV tokens, and what is refused."""
    from site_engine.config_sources import load_groups
    from site_engine.errors import ConfigError
    from site_engine.plan import parse_gpus, plan_groups

    try:
        configs = load_groups(config, os.environ, NO_PART_OF_PLANS, **parse_overrides(overrides))
        plans = plan_groups(configs, parse_gpus(gpus))
    except ConfigError as error:
        raise CommandFailed(
            "the site can't be planned", cause=str(error), exit_code=ExitCode.WRONG_USAGE
        ) from error
    terminal = session_of(context).terminal
    if as_json:
        described = [describe_plan(each) for each in plans]
        terminal.json(described[0] if len(described) == 1 else {"groups": described})
    else:
        for each in plans:
            show_plan(terminal, each, f"{each.site}: " if len(plans) > 1 else "")
        if len(plans) > 1:
            left = plans[0].gpus.bytes - sum(each.used_bytes for each in plans)
            terminal.info(f"{format_bytes(max(0, left))} are left on one {plans[0].gpus.name}")
    if any(each.refused for each in plans):
        raise typer.Exit(ExitCode.FAILED)


def describe_plan(found: Plan) -> dict[str, Any]:
    return {
        **found._asdict(),
        "gpus": found.gpus._asdict(),
        "own_bytes": found.own_bytes,
        "variants": [each._asdict() for each in found.variants],
        "devices": [each._asdict() for each in found.devices],
    }


def show_plan(terminal: Terminal, found: Plan, title: str) -> None:
    what = "base, shared by all" if found.ranks == 1 else f"share of one of {found.ranks} devices"
    rows = [[what, format_bytes(found.shared_bytes)]]
    if found.slots_bytes:
        rows.append(["slots for adapters", format_bytes(found.slots_bytes)])
    for each in found.variants:
        size = ("at most " if each.kind == "model" else "") + format_bytes(each.own_bytes)
        rows.append([each.id, size if each.own_bytes else "in the slots"])
    rows.append([f"{found.kv_tokens:,} KV tokens", format_bytes(found.kv_tokens * found.kv_bytes_per_token)])
    on = f"on one {found.gpus.name} of {format_bytes(found.gpus.bytes)}"
    terminal.table([f"{title}{on}", "memory"], rows)
    if len(found.devices) > 1:
        rows = [
            [each.device, *map(format_bytes, (each.weights_bytes, each.kv_bytes, each.left_bytes))]
            for each in found.devices
        ]
        terminal.table(["each device holds all of this", "weights", "KV", "left"], rows)
        engines = len(rows) // found.ranks
        terminal.info(f"{engines * found.kv_tokens:,} KV tokens in all; one prompt fits one engine")
    for name, reason in found.refused.items():
        terminal.info(f"{name} is refused: {reason}")


def format_bytes(size: int) -> str:
    return f"{size / 1e9:,.2f} GB" if size >= 10**9 else f"{size / 1e6:,.1f} MB"


def exit_at_once(status: int) -> NoReturn:
    """End the process without unloading modules: all is closed, and unloading torch would take seconds."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def parse_overrides(overrides: list[str] | None) -> dict[str, str]:
    split = [item.partition("=") for item in overrides or []]
    wrong = [name for name, equals, _ in split if not equals]
    if wrong:
        raise CommandFailed(
            f"--set {wrong[0]} has no value", tip="--set name=value", exit_code=ExitCode.WRONG_USAGE
        )
    return {name: value for name, _, value in split}
