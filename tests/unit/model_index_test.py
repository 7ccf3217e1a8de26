"""The index of models is what a look at every site would find, after any changes, and costs little."""

from __future__ import annotations

from types import MappingProxyType

from hypothesis import given
from hypothesis import strategies as st

from gateway.domain import Model
from gateway.federation.model_index import ModelIndex
from gateway.routing.fleet import NO_MODELS

models = st.builds(
    Model,
    st.sampled_from("abc"),
    st.sampled_from(("r1", "r2")),
    st.sampled_from((0, 100, 200)),
    st.just(0),
    st.just("o"),
    st.frozensets(st.sampled_from(("chat", "tools"))),
    st.sampled_from((0, 400, 800)),
    st.sampled_from(("", "base")),
)
served = st.lists(models, max_size=3).map(lambda found: MappingProxyType({each.id: each for each in found}))
changes = st.lists(st.tuples(st.sampled_from(("s1", "s2", "s3")), served), max_size=20)


@given(changes)
def test_it_is_what_a_look_at_every_site_finds(
    changes: list[tuple[str, MappingProxyType[str, Model]]],
) -> None:
    index, sites = ModelIndex(), {}
    for name, found in changes:
        before, old = index.models, dict(index.models)
        index.put(name, found)
        sites[name] = found
        assert dict(index.models) == old or index.models is not before
        assert index.models.keys() == {id_ for each in sites.values() for id_ in each}
        for id_, model in index.models.items():
            several = [each[id_] for each in sites.values() if id_ in each]
            bounds = [each.max_prompt_chars for each in several]
            assert model.id == id_
            assert model.features == frozenset().union(*(each.features for each in several))
            assert model.context_tokens == max(each.context_tokens for each in several)
            assert model.max_prompt_chars == (max(bounds) if all(bounds) else 0)
            assert model.parent in {each.parent for each in several}
    for name in sites:
        index.put(name, NO_MODELS)
    assert not index.models


def test_the_same_models_change_nothing() -> None:
    index = ModelIndex()
    one = {"m": Model("m", "r", 100, 0, "o")}
    index.put("s", one)
    before = index.models
    index.put("s", one)
    index.put("s", dict(one))
    assert index.models is before
