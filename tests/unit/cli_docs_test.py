"""docs/commands is what the program says of itself, a page a command."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from typer import BadParameter

from mico.cli import command_tree
from mico.command_docs import command_pages, write

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "commands"
BLOCK = re.compile(r"^```.*?\n(.*?)^```", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^(?:\$ )?mico ([^|;&\n]+)", re.MULTILINE)


def documented_commands() -> Iterator[Any]:
    """Yield the words of each command in a code block of the README and of the guides."""
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        for block in BLOCK.findall(page.read_text()):
            for line in COMMAND.findall(block.replace("\\\n", " ")):
                words = shlex.split(line, comments=True)
                if words and re.fullmatch(r"[a-z-]+", words[0]):
                    yield pytest.param(words, id=f"{page.name}: {' '.join(words)[:60]}")


@pytest.mark.parametrize("words", list(documented_commands()))
def test_a_command_in_the_guides_is_understood(words: list[str]) -> None:
    """`mico chat "Why is the sky blue?"` stood in a guide, and is wrong usage."""
    command = command_tree()
    while len(words) and words[0] in getattr(command, "commands", {}):
        command, words = command.commands[words[0]], words[1:]
    names_files = {"CORPUS", "ARTIFACT", "person.json"}.intersection(words)
    expected: Any = pytest.raises(BadParameter, match="does not exist") if names_files else nullcontext()
    with expected:
        command.make_context("mico", words)


def test_the_pages_are_up_to_date() -> None:
    written = {path.name: path.read_text() for path in FOLDER.iterdir()}
    assert written == command_pages(), "run ./dev docs"


def test_every_command_has_a_page_that_says_what_it_is_for() -> None:
    for name, text in command_pages().items():
        assert text.startswith("# "), name
        assert "\n\n\n" not in text, name
        assert "**Options**:\n\n\n" not in text, name
        for section in text.split("\n#")[1:]:
            assert section.splitlines()[2].rstrip().endswith((".", "`")), (name, section)


def test_pages_of_commands_that_are_gone_go(tmp_path: Path) -> None:
    (tmp_path / "gone.md").write_text("# `mico gone`\n")
    write(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == set(command_pages())
