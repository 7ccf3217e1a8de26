"""Which keys may ask for which models: those of other tenants do not exist, others may be forbidden."""

from __future__ import annotations

import pytest

from gateway.domain import Caller, Model, Query, Sampling
from gateway.errors import Forbidden, ModelNotFound
from gateway.query.admission import check_model


def served(name: str, parent: str = "", tenant: str = "") -> Model:
    return Model(name, "rev", 1024, 0, "o", parent=parent, tenant=tenant)


MODELS = {
    each.id: each
    for each in (
        served("base"),
        served("other"),
        served("of-operator", parent="base"),
        served("of-one", parent="base", tenant="one"),
        served("of-one-other", parent="other", tenant="one"),
        served("of-two", parent="base", tenant="two"),
        served("of-one-without-base", tenant="one"),
    )
}
OF_ONE = {"of-one", "of-one-other", "of-one-without-base"}
OPEN = {"base", "other", "of-operator"}


@pytest.mark.parametrize(
    ("tenant", "names", "allowed"),
    [
        ("one", None, OPEN | OF_ONE),
        ("two", None, OPEN | {"of-two"}),
        ("one", {"base"}, {"base", "of-one"}),
        ("one", {"other"}, {"other", "of-one-other"}),
        ("one", {"base", "other"}, {"base", "other", "of-one", "of-one-other"}),
        ("one", {"of-one"}, {"of-one"}),
        ("one", {"of-two", "of-operator"}, {"of-operator"}),
        ("one", set(), set()),
        ("two", {"base"}, {"base", "of-two"}),
        ("two", {"of-one", "other"}, {"other"}),
        ("", {"base"}, {"base"}),
    ],
)
def test_a_key_may_use_its_models_and_what_its_tenant_trained_from_them(
    tenant: str, names: set[str] | None, allowed: set[str]
) -> None:
    caller = Caller("k", tenant, models=None if names is None else frozenset(names))
    exist = OPEN | {each.id for each in MODELS.values() if each.tenant == tenant}
    for model in MODELS:
        query = Query("q", model, "hi", Sampling(), caller, 0.0, 100.0)
        if model in allowed:
            check_model(query, models=MODELS, fleet_complete=True)
            continue
        with pytest.raises(Forbidden if model in exist else ModelNotFound) as refused:
            check_model(query, models=MODELS, fleet_complete=True)
        listed = str(refused.value).partition("served here: ")[2]
        assert not listed or {*listed.split(", ")} == (allowed or {"none for this key"})
