"""The command tree of `mico`.

Imports only lightweight modules. Each command imports its dependencies when it runs.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, requires
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any

import typer

from mico.commands import (
    adapters,
    batch,
    bench,
    chat,
    config,
    database,
    doctor,
    drill,
    federation,
    keys,
    models,
    operate,
    pki,
    predictor,
    processes,
    quotas,
    records,
    routes,
    simulate,
    sites,
    top,
    tune,
)
from mico.errors import CommandFailed, ExitCode
from mico.session import Session

log = logging.getLogger(__name__)

DEBUG_TIP = "mico --debug shows where"
EXTRAS_TIP = "./dev setup in a checkout installs all; else install Mico with the extra "

app = typer.Typer(
    name="mico",
    help="One OpenAI-compatible endpoint over GPU sites in many clouds.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # help texts contain literal brackets
    context_settings={"help_option_names": ["-h", "--help"]},
)


def show_version(requested: bool) -> None:
    if requested:
        from importlib.metadata import version

        typer.echo(f"mico {version('mico')}")
        raise typer.Exit


@app.callback()
def prepare(
    context: typer.Context,
    folder: Annotated[
        Path, typer.Option(envvar="MICO_FOLDER", help="The folder of the local federation.")
    ] = Path(".mico"),
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress, only data and errors.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show a traceback when something fails.")] = False,
    version: Annotated[bool, typer.Option("--version", callback=show_version, is_eager=True)] = False,
) -> None:
    if debug:
        os.environ["MICO_DEBUG"] = "1"
    context.obj = session = Session.open(folder, quiet=quiet)
    context.call_on_close(session.exit_stack.close)


app.command()(federation.up)
app.command()(federation.down)
app.command()(federation.status)
app.command()(chat.chat)
app.add_typer(batch.app, name="batch")
app.add_typer(tune.app, name="tune")
app.add_typer(adapters.app, name="adapters")
app.add_typer(models.app, name="models")
for order in (operate.drain, operate.pause, operate.resume, operate.weight, operate.pin_off, operate.unpin):
    sites.app.command()(order)
app.add_typer(sites.app, name="sites")
app.command()(top.top)
app.add_typer(keys.app, name="keys")
app.add_typer(quotas.tenants, name="tenants")
app.add_typer(quotas.quotas, name="quotas")
app.add_typer(routes.app, name="routes")
app.command()(records.usage)
app.command()(records.audit)
app.add_typer(pki.app, name="pki")
app.add_typer(predictor.app, name="predictor")
app.command()(database.explain)
app.command()(doctor.doctor)
app.add_typer(drill.app, name="drill")
app.command(context_settings={"allow_interspersed_args": False})(bench.bench)
app.command()(simulate.simulate)
app.command()(processes.gateway)
app.add_typer(processes.sites, name="site")
app.add_typer(config.app, name="config")
app.add_typer(database.app, name="db")


@cache
def command_tree() -> Any:
    """Return the root command of `app`, which contains all others. Cached, since typer rebuilds it."""
    return typer.main.get_command(app)


def extra_of(package: str) -> str:
    """Return the first extra of Mico that requires a package, "" if there is none."""
    with suppress(PackageNotFoundError):
        for requirement in requires("mico") or ():
            name, _, extra = requirement.partition("; extra == ")
            if extra and re.split(r"[^\w-]", name)[0] == package:
                return extra.strip("'\"")
    return ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status.

    A failure prints at most three lines on stderr. With --debug, it is raised with its traceback.
    """
    open_closed_streams()
    replace_undecodable_text()
    try:
        command_tree()(arguments, prog_name="mico")
    except CommandFailed as failure:
        return report_failure(failure)
    except ModuleNotFoundError as error:
        extra = extra_of(error.name or "") or "that it belongs to"
        return report_failure(CommandFailed("a package is missing", cause=str(error), tip=EXTRAS_TIP + extra))
    except OSError as error:
        cause = f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)
        return report_failure(CommandFailed("the machine refused", cause=cause, tip=DEBUG_TIP))
    except UnicodeError as error:
        undecodable = CommandFailed(
            "an argument or a setting is no text",
            cause=str(error),
            tip=DEBUG_TIP,
            exit_code=ExitCode.WRONG_USAGE,
        )
        return report_failure(undecodable)
    except SystemExit as exit_request:
        return exit_request.code if isinstance(exit_request.code, int) else 1
    except Exception as error:
        if logging.root.handlers:  # a gateway or a site logs the traceback
            log.critical("a fault ends this process", exc_info=error)
        fault = CommandFailed("mico met a fault of its own", cause=repr(error), tip=DEBUG_TIP)
        return report_failure(fault, error)
    return 0


def open_closed_streams() -> None:
    """Open /dev/null for each closed standard stream (`>&-`), which Python sets to None.

    Writing to a closed stdout raises OSError, as for a full disk.
    """
    modes = {"stdin": "r", "stdout": "r", "stderr": "w"}  # stdout read-only, or data would be lost silently
    for name, mode in modes.items():
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115, PTH123  as long as the process


def replace_undecodable_text() -> None:
    """Replace characters that cannot be encoded, and bytes that cannot be decoded, on standard streams."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")


def report_failure(failure: CommandFailed, source: Exception | None = None) -> int:
    """Print a failure on stderr and return its exit status. With --debug, raise `source` or the failure."""
    if "MICO_DEBUG" in os.environ:
        raise source or failure
    sys.stderr.write("\n".join(failure.lines()) + "\n")
    return failure.exit_code
