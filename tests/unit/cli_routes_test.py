"""The targets of `mico routes set` as they are typed."""

from __future__ import annotations

import pytest

from mico.commands.routes import SHADOW_FIELDS, TARGET_FIELDS, parse
from mico.errors import CommandFailed, ExitCode


@pytest.mark.parametrize(
    ("text", "target"),
    [
        ("org/model-7b", {"model": "org/model-7b"}),
        ("llama3:8b,weight=5", {"model": "llama3:8b", "weight": 5.0}),
        (
            "b,when=slower_than,slower_than_s=2.5",
            {"model": "b", "when": "slower_than", "slower_than_s": 2.5},
        ),
        ("odd,name", {"model": "odd,name"}),
        ("odd,name,when=overloaded", {"model": "odd,name", "when": "overloaded"}),
        ("a=b", {"model": "a=b"}),
    ],
)
def test_a_target_is_a_model_and_its_fields(text: str, target: dict[str, object]) -> None:
    assert parse(text, TARGET_FIELDS) == target


def test_a_share_is_a_number() -> None:
    assert parse("s,share=0.05", SHADOW_FIELDS) == {"model": "s", "share": 0.05}
    with pytest.raises(CommandFailed, match="share is 'many'"):
        parse("s,share=many", SHADOW_FIELDS)


@pytest.mark.parametrize("text", ["llama,wieght=5", "llama,weight=5,wen=always", "llama, weight=5"])
def test_a_field_that_is_not_known_is_no_part_of_the_name(text: str) -> None:
    with pytest.raises(CommandFailed, match="is not known") as failure:
        parse(text, TARGET_FIELDS)
    assert failure.value.exit_code is ExitCode.WRONG_USAGE
