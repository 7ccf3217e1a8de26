"""Outputs that are a token and nothing else are kept in columns, and read as any others."""

from __future__ import annotations

from site_engine.core.request import Finish, Output
from site_engine.core.step_outputs import StepOutputs, with_more_than_a_token
from site_engine.engine import process_packing as packing

NUMBERS = {"a": 7, "b": 8, "c": 9}


def outputs() -> StepOutputs:
    found = StepOutputs()
    found.request_ids, found.token_ids, found.generated = ["a", "c"], [11, 13], [4, 2]
    found.others.append(Output("b", token_ids=(12,), finish=Finish.LENGTH, completion_tokens=3))
    return found


def test_columns_are_read_as_outputs() -> None:
    found = outputs()
    assert list(found) == [
        Output("a", token_ids=(11,), completion_tokens=4),
        Output("c", token_ids=(13,), completion_tokens=2),
        found.others[0],
    ]
    assert len(found) == 3
    assert found[-1] is found.others[0]
    assert not StepOutputs()


def test_columns_are_packed_as_a_list_of_the_same_outputs() -> None:
    packed = packing.to_step(outputs(), NUMBERS)
    assert packed == packing.to_step(list(outputs()), NUMBERS)
    assert packed.numbers == [7, 9, 8]
    assert packed.token_ids == [11, 13, 12]
    assert [(each.row, each.finish) for each in packed.details] == [(2, Finish.LENGTH)]


def test_what_is_more_than_a_token_is_not_in_the_columns() -> None:
    found = outputs()
    assert with_more_than_a_token(found) == found.others
    assert with_more_than_a_token(found.others) is found.others
