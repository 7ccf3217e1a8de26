"""Laws of decoding: what a body nests is counted exactly, wherever its bytes are cut, and bounded."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.bounded_json import decode
from gateway.errors import BadRequest
from wire.json_structure import MAX_STRUCTURE, VALUES, exceeds

texts = st.text(st.sampled_from('ab"\\{}[]:,é\n'), max_size=12)
values = st.recursive(
    st.none() | st.integers() | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=20,
)


def structure(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + sum(1 + structure(each) for each in value.values())
    return 1 + sum(map(structure, value)) if isinstance(value, list) else 0


@given(value=values, slice_bytes=st.integers(1, 40), ascii_only=st.booleans())
def test_objects_lists_and_fields_are_counted_outside_strings(
    value: Any, slice_bytes: int, ascii_only: bool
) -> None:
    raw = json.dumps(value, ensure_ascii=ascii_only).encode()
    count = structure(value)
    assert not exceeds(raw, count, slice_bytes)
    assert exceeds(raw, count - 1, slice_bytes)


@pytest.mark.parametrize("item", [b"{}", b"[]", b'{"a":1}'])
def test_a_body_that_nests_too_much_is_refused_before_it_is_decoded(item: bytes) -> None:
    broken_at_its_end = b'{"model":"m","x":[' + b",".join([item] * (MAX_STRUCTURE + 1))
    with pytest.raises(BadRequest, match=f"more than {MAX_STRUCTURE} objects"):
        decode(broken_at_its_end)


def test_items_of_lists_are_counted_where_they_are_asked_for() -> None:
    raw = b'{"a, b": [1, 2, [3, 4]], "c": "5, 6"}'
    assert exceeds(raw, 8, signs=VALUES)
    assert not exceeds(raw, 9, signs=VALUES)


def test_a_prompt_may_hold_any_signs() -> None:
    prompt = '{"a": [' * MAX_STRUCTURE
    assert decode(json.dumps({"prompt": prompt}).encode()) == {"prompt": prompt}
