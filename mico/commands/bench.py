"""`mico bench …`: run a program of bench/, which a checkout has and an installed package has not."""

from __future__ import annotations

import ast
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from mico.errors import CommandFailed, ExitCode
from mico.session import session_of


def bench(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument(help="A program; without it they are listed.")] = None,
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Options of the program; --help lists them.")
    ] = None,
) -> None:
    """Run a benchmark; every quoted figure has its program."""
    programs = find_programs()
    if name is None:
        rows = [(each, first_docstring_line(file)) for each, file in programs.items()]
        session_of(context).terminal.table(("name", "what it measures"), rows)
        return
    if name not in programs:
        tip = "mico bench lists them"
        raise CommandFailed(f"there is no benchmark {name}", tip=tip, exit_code=ExitCode.WRONG_USAGE)
    raise typer.Exit(subprocess.call([sys.executable, "-m", f"bench.{name}", *(arguments or ())]))


def find_programs() -> dict[str, Path]:
    """Return the file of each program by its name, studies after the others.

    Raises CommandFailed outside a checkout.
    """
    package = find_spec("bench")
    if package is None or package.origin is None:
        raise CommandFailed("benchmarks are not installed", tip="run it in a checkout: ./dev bench")
    root = Path(package.origin).parent
    studies = {f"studies.{file.stem}": file for file in sorted((root / "studies").glob("[a-z]*.py"))}
    programs = {file.stem: file for file in sorted(root.glob("[a-z]*.py"))} | studies
    return {name: file for name, file in programs.items() if "__main__" in file.read_text("utf-8")}


def first_docstring_line(file: Path) -> str:
    return (ast.get_docstring(ast.parse(file.read_text("utf-8"))) or "").partition("\n")[0]
