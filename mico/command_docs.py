"""Generate docs/commands, one page per command, with Typer's generator: `python -m mico.command_docs`.

The output folder can be passed as an argument.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import typer.main
from typer.cli import get_docs_for_click

from mico.cli import command_tree

FOLDER = Path("docs/commands")
OMITTED = re.compile(
    r"^\* `[^`]*--help`.*\n"
    r"|^\*\*Options\*\*:\n\n(?=\* `[^`]*--help`.*\n\n)"
    r"|^\*\*Commands\*\*:\n\n(\* .*\n)*\n",
    re.M,
)
"""Matches the --help option of every command, and lists of subcommands, which have their own sections."""
INDEX = """# The commands

Made from the program by `./dev docs`; a test holds the two together. `mico --help` says the same.

{commands}

Every command that reads takes `--json`: stable names, no colours, data on stdout and everything else on
stderr. Exit status: 0 done, 1 failed, 2 wrong usage, 3 partly failed, 4 not authenticated, 130 interrupted.

A setting is taken from its flag, else from `MICO_…` in the environment, else from `mico.toml`, else it has
its default; `mico config show` says which. `mico --install-completion` teaches your shell the names.
"""


def command_pages() -> dict[str, str]:
    """Return the text of each page by file name."""
    group = command_tree()
    context = typer.Context(group, info_name="mico")
    found = {f"{name}.md": command_page(context, name, command) for name, command in group.commands.items()}
    lines = [
        f"- [`mico {name}`]({name}.md): {first_sentence(command.help)}"
        for name, command in sorted(group.commands.items())
    ]
    return {"README.md": INDEX.format(commands="\n".join(lines)), **found}


def command_page(context: typer.Context, name: str, command: Any) -> str:
    inner = typer.Context(command, info_name=name, parent=context)
    text = get_docs_for_click(obj=command, ctx=inner, name=f"mico {name}")
    return re.sub(r"\n{3,}", "\n\n", OMITTED.sub("", text)).strip() + "\n"


def first_sentence(text: str) -> str:
    return " ".join(text.split()).partition(". ")[0].rstrip(".") + "."


def write(folder: Path) -> None:
    """Write every page to `folder`, and delete the pages of commands that no longer exist."""
    folder.mkdir(parents=True, exist_ok=True)
    written = command_pages()
    for old in folder.glob("*.md"):
        if old.name not in written:
            old.unlink()
    for name, text in written.items():
        (folder / name).write_text(text)


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
