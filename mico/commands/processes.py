"""`mico gateway` and `mico site`: one process each, as deployments run them."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from mico.errors import CommandFailed, ExitCode

ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="A TOML file; the environment overrides it.")
]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", help="name=value, overrides file and environment; repeatable.")
]


def gateway(config: ConfigFile = None, overrides: Overrides = None) -> None:
    """Run one gateway: HTTP for clients, gRPC for sites. Shuts down gracefully on SIGTERM."""
    from gateway.app import run
    from gateway.config import ConfigError, load
    from gateway.store.errors import StoreError

    try:
        status = run(load(config, os.environ, parse_overrides(overrides)))
    except ConfigError as error:
        raise CommandFailed(
            "the gateway can't start", cause=str(error), exit_code=ExitCode.WRONG_USAGE
        ) from error
    except StoreError as error:
        raise CommandFailed("the gateway can't start", cause=str(error)) from error
    raise typer.Exit(status)


def site(
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
    from site_engine.app import run
    from site_engine.config import load
    from site_engine.errors import ConfigError

    try:
        loaded = load(config, os.environ, **{"engine": engine, "url": url, **parse_overrides(overrides)})
    except ConfigError as error:
        raise CommandFailed(
            "the site can't start", cause=str(error), exit_code=ExitCode.WRONG_USAGE
        ) from error
    exit_at_once(run(loaded))


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
