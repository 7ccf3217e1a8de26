"""docs/commands is what the program says of itself, a page a command."""

from __future__ import annotations

from pathlib import Path

from mico.command_docs import command_pages, write

FOLDER = Path(__file__).parents[2] / "docs" / "commands"


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
