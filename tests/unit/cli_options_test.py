"""Groups of options: declared once, expanded into each command's signature."""

from __future__ import annotations

import inspect
from typing import Annotated, NamedTuple

import typer
from typer.testing import CliRunner

from mico.options import with_option_groups


class Place(NamedTuple):
    city: Annotated[str, typer.Option(help="The city.")] = "Bonn"
    floor: Annotated[int, typer.Option("--floor", "-f", min=0, help="The floor.")] = 0


received: list[tuple[str, Place, bool]] = []
app = typer.Typer()


@app.command()
@with_option_groups
def visit(name: str, *, place: Place, loud: bool = False) -> None:
    """Visit somebody."""
    received.append((name, place, loud))


def test_a_group_stands_in_its_place_among_the_options() -> None:
    assert list(inspect.signature(visit).parameters) == ["name", "city", "floor", "loud"]
    assert visit.__doc__ == "Visit somebody."


def test_a_command_receives_a_group_as_one_value() -> None:
    for arguments, place in (
        ([], Place()),
        (["--city", "Rome", "-f", "2", "--loud"], Place("Rome", 2)),
    ):
        assert CliRunner().invoke(app, ["ann", *arguments]).exit_code == 0
        assert received.pop() == ("ann", place, "--loud" in arguments)


def test_a_bound_of_an_option_in_a_group_holds() -> None:
    assert CliRunner().invoke(app, ["ann", "--floor", "-1"]).exit_code == 2
