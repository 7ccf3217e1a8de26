"""Laws of the stub provider's planning: what is planned and applied for any schema and any configuration."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from infra.terraform.tests.planning import apply, is_unknown, misuse, plan, read_only

TYPES = st.sampled_from(["string", "number", "bool", ["list", "string"], ["map", "string"]])
FLAGS = st.sampled_from(
    [{"required": True}, {"optional": True}, {"optional": True, "computed": True}, {"computed": True}]
)
ATTRIBUTES = st.dictionaries(
    st.sampled_from("abcd"), st.builds(lambda kind, flags: {"type": kind, **flags}, TYPES, FLAGS)
)
BLOCKS = st.recursive(
    st.builds(lambda attributes: {"attributes": attributes}, ATTRIBUTES),
    lambda inner: st.builds(
        lambda attributes, block: {
            "attributes": attributes,
            "block_types": {"inner": {"nesting_mode": "list", "block": block}},
        },
        ATTRIBUTES,
        inner,
    ),
    max_leaves=3,
)


def configured(block: dict[str, Any], given: bool) -> dict[str, Any]:
    """A configuration that sets everything it may, or only what it must."""
    values: dict[str, Any] = {
        name: "set" if attribute.get("required") or (given and attribute.get("optional")) else None
        for name, attribute in block["attributes"].items()
    }
    for name, nested in block.get("block_types", {}).items():
        values[name] = [configured(nested["block"], given)]
    return values


def unknowns(value: Any) -> int:
    if isinstance(value, dict):
        return sum(map(unknowns, value.values()))
    return sum(map(unknowns, value)) if isinstance(value, list) else int(is_unknown(value))


@given(BLOCKS, st.booleans())
def test_apply_leaves_nothing_unknown_and_the_next_plan_changes_nothing(
    block: dict[str, Any], all_set: bool
) -> None:
    state = apply(block, plan(block, configured(block, all_set), None), "seed")
    assert unknowns(state) == 0
    assert plan(block, state, state) == state


@given(BLOCKS, st.booleans())
def test_what_was_configured_is_what_is_planned(block: dict[str, Any], all_set: bool) -> None:
    config = configured(block, all_set)
    planned = plan(block, config, None)
    assert planned is not None
    for name, attribute in block["attributes"].items():
        if config[name] is not None:
            assert planned[name] == config[name]
        else:
            assert is_unknown(planned[name]) == bool(attribute.get("computed"))


@given(BLOCKS)
def test_setting_what_only_the_provider_sets_is_misuse(block: dict[str, Any]) -> None:
    assert misuse(block, configured(block, True)) == []
    wrong = {**configured(block, True), **dict.fromkeys(block["attributes"], "set")}
    assert misuse(block, wrong) == [name for name, each in block["attributes"].items() if read_only(each)]


def test_a_write_only_value_is_in_no_plan_and_in_no_state() -> None:
    block = {"attributes": {"password_wo": {"type": "string", "optional": True, "write_only": True}}}
    planned = plan(block, {"password_wo": "secret"}, None)
    assert planned == apply(block, planned, "seed") == {"password_wo": None}
