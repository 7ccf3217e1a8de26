"""Operators are counted where their time belongs."""

from __future__ import annotations

import pytest

from bench.normalized import REST, kind_of


@pytest.mark.parametrize(
    ("operator", "kind"),
    [
        ("aten::addmm", "linear layers"),
        ("aten::bmm", "attention"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", "attention"),
        ("aten::index_put_", "KV writes"),
        ("aten::argmax", "sampling"),
        ("aten::mul", REST),
    ],
)
def test_operators_have_a_kind(operator: str, kind: str) -> None:
    assert kind_of(operator) == kind
