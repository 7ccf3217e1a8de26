"""The models that sites serve, by id, each with the abilities of all its sites combined.

Updated one site at a time, as there are thousands of variants that change, and every query reads the index.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

from gateway.domain import Model, ModelState
from gateway.routing.fleet import NO_MODELS


class Abilities(NamedTuple):
    """The properties of a model that may differ between sites."""

    features: frozenset[str]
    context_tokens: int
    max_prompt_chars: int
    parent: str
    state: ModelState

    @staticmethod
    def of(model: Model) -> Abilities:
        return Abilities(
            model.features, model.context_tokens, model.max_prompt_chars, model.parent, model.state
        )


class ModelIndex:
    """The index. `models` is a live view of it; after each change it is a new object, to detect changes."""

    def __init__(self) -> None:
        self._models: dict[str, Model] = {}
        self._abilities: dict[str, Counter[Abilities]] = {}  # by model: the number of sites per abilities
        self._sites: dict[str, Mapping[str, Model]] = {}
        self.models: Mapping[str, Model] = NO_MODELS

    def put(self, site: str, models: Mapping[str, Model]) -> None:
        """Replace the models of a site. An empty mapping removes the site."""
        before = self._sites.get(site, NO_MODELS)
        if models is before:
            return
        gone = [each for id_, each in before.items() if models.get(id_) != each]
        come = [each for id_, each in models.items() if before.get(id_) != each]
        if models:
            self._sites[site] = models
        else:
            self._sites.pop(site, None)
        for model in gone:
            counts = self._abilities[model.id]
            counts[Abilities.of(model)] -= 1
            counts += Counter()  # drops entries of no site
        for model in come:
            self._models[model.id] = model
            self._abilities.setdefault(model.id, Counter())[Abilities.of(model)] += 1
        for id_ in {each.id for each in (*gone, *come)}:
            self._merge(id_)
        if gone or come:
            self.models = MappingProxyType(self._models)

    def _merge(self, id_: str) -> None:
        """Combine the abilities of a model's sites: all features, the longest context, the best state."""
        several = self._abilities[id_]
        if not several:
            del self._abilities[id_], self._models[id_]
            return
        bounds = [each.max_prompt_chars for each in several]
        merged = Abilities(
            frozenset().union(*(each.features for each in several)),
            max(each.context_tokens for each in several),
            max(bounds) if all(bounds) else 0,
            next(iter(several)).parent,
            next(state for state in ModelState if any(each.state is state for each in several)),
        )
        if merged != Abilities.of(self._models[id_]):
            self._models[id_] = replace(self._models[id_], **merged._asdict())
