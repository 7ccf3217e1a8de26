"""Choose the model that answers for a route, a name for several models: an alias, a fallback, a canary.

Routes have one level: the targets of a route are models, never routes, so that no loop can exist.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from hashlib import blake2b
from itertools import accumulate
from math import inf, isfinite
from typing import Final, NamedTuple

import msgspec

from gateway.domain import Model
from gateway.errors import BadRequest

MAX_TARGETS: Final = 16
MAX_NAME_CHARS: Final = 200
MAX_WEIGHT: Final = 1e6
OWNED_BY: Final = "route"
DRAW_BYTES: Final = 6  # a fraction of 48 bits is exact in a float


class When(StrEnum):
    """When a target takes a query. An ALWAYS target is drawn by weight. The others stand in for the drawn
    target: UNAVAILABLE while no site serves it, OVERLOADED while all its sites have queues, and SLOWER_THAN
    while its first token is expected after more than `slower_than_s` seconds.
    """

    ALWAYS = "always"
    UNAVAILABLE = "unavailable"
    OVERLOADED = "overloaded"
    SLOWER_THAN = "slower_than"


class Target(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model behind a route. A weight of 0 disables the target, whatever `when` says."""

    model: str
    weight: float = 1.0
    when: When = When.ALWAYS
    slower_than_s: float = 0.0


class Shadow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model that gets copies of a share (0 to 1) of the answered queries, and whose answers nobody sees."""

    model: str
    share: float


class ModelRoute(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A name for several models. `targets`: in the order in which they stand in for one another."""

    name: str
    targets: tuple[Target, ...]
    shadow: Shadow | None = None

    def without(self, model: str) -> ModelRoute:
        """Return the route without a model: its weight as a target is 0, and it is not the shadow."""
        targets = tuple(
            msgspec.structs.replace(each, weight=0.0) if each.model == model else each
            for each in self.targets
        )
        shadow = None if self.shadow is not None and self.shadow.model == model else self.shadow
        return ModelRoute(self.name, targets, shadow)


class Prospect(NamedTuple):
    """The shortest wait and the earliest first token expected over a model's sites, in seconds from now. Both
    are infinite if no site can take the query.
    """

    wait_s: float = inf
    first_token_s: float = inf


def draw(key: str) -> float:
    """Return a number in [0, 1) that depends only on the key, uniformly distributed over keys."""
    digest = blake2b(key.encode(), digest_size=DRAW_BYTES).digest()
    return float(int.from_bytes(digest) / 256**DRAW_BYTES)


def in_order(targets: Sequence[Target], drawn: float) -> list[Target]:
    """Return the ALWAYS target selected by weight with `drawn`, in [0, 1), then the others in their order.
    Without an ALWAYS target, return the others in their order. Targets of weight 0 are left out.
    """
    taking = [target for target in targets if target.weight > 0]
    always = [target for target in taking if target.when is When.ALWAYS]
    if not always:
        return taking
    ends = list(accumulate(target.weight for target in always))
    first = always[min(bisect_right(ends, drawn * ends[-1]), len(always) - 1)]
    return [first, *(each for each in taking if each is not first)]


def stand_in(first: str, others: Sequence[Target], prospect: Callable[[str], Prospect]) -> Target | None:
    """Return the first of `others` to stand in for the overloaded or slow model `first`, None if none does.

    Also return None while no site can take a query for `first`, which is handled when the query is placed.
    An overloaded model is never replaced by another overloaded one, nor a slow model by a slower one.
    """
    conditional = [each for each in others if each.when in (When.OVERLOADED, When.SLOWER_THAN)]
    if not conditional:
        return None
    here = prospect(first)
    for target in conditional if isfinite(here.first_token_s) else ():
        if target.when is When.OVERLOADED:
            if here.wait_s > 0.0 and prospect(target.model).wait_s == 0.0:
                return target
        elif here.first_token_s > max(target.slower_than_s, prospect(target.model).first_token_s):
            return target
    return None


def is_shadowed(shadow: Shadow, query_id: str) -> bool:
    return draw(f"shadow {query_id}") < shadow.share


def route_models(routes: Mapping[str, ModelRoute], served: Mapping[str, Model]) -> dict[str, Model]:
    """Return the routes as models, by name, each with the features of all its served targets and the longest
    context. Routes without a served target are left out. `served`: the models that sites serve, by id.
    """
    found: dict[str, Model] = {}
    for name, route in routes.items():
        behind = [served[each.model] for each in route.targets if each.weight > 0 and each.model in served]
        if behind:
            chars = [model.max_prompt_chars for model in behind]
            found[name] = replace(
                behind[0],
                id=name,
                owned_by=OWNED_BY,
                tenant=behind[0].tenant if len({model.tenant for model in behind}) == 1 else "",
                features=frozenset().union(*(model.features for model in behind)),
                context_tokens=max(model.context_tokens for model in behind),
                max_prompt_chars=max(chars) if all(chars) else 0,
            )
    return found


def may_name(may_use: Callable[[str], bool], route: ModelRoute) -> bool:
    """Return whether a key may name the route, that is, may use one of its targets. The route's own name is
    not checked: a route with the name of a model must not open other models to the keys of that model.
    """
    return any(may_use(target.model) for target in route.targets if target.weight > 0)


def check_route(route: ModelRoute, others: Collection[ModelRoute]) -> None:
    """Raise BadRequest if the route is invalid by itself or together with the `others`."""
    _check_name(route.name, "name")
    if not 0 < len(route.targets) <= MAX_TARGETS:
        raise BadRequest(f"a route has 1 to {MAX_TARGETS} targets", param="targets")
    for number, target in enumerate(route.targets):
        _check_target(target, f"targets[{number}]")
    models = [target.model for target in route.targets]
    if len({*models}) < len(models):
        raise BadRequest("a model is a target of a route once", param="targets")
    if not any(target.weight > 0 and target.when is When.ALWAYS for target in route.targets):
        raise BadRequest(
            "a route needs a target with when 'always' and a weight above 0; remove the route to end it",
            param="targets",
        )
    if route.shadow is not None:
        _check_name(route.shadow.model, "shadow.model")
        if not 0.0 < route.shadow.share <= 1.0:
            raise BadRequest("a share is above 0 and at most 1", param="shadow.share")
        models.append(route.shadow.model)
    _check_one_level(route.name, models, others)


def check_target_left(route: ModelRoute) -> None:
    """Raise BadRequest if the route has no target left, as every query for it would fail."""
    if not any(target.weight > 0 for target in route.targets):
        raise BadRequest(
            f"the route {route.name!r} would have no target left; remove the route to end it", param="model"
        )


def _check_one_level(name: str, models: Sequence[str], others: Collection[ModelRoute]) -> None:
    names = {other.name for other in others if other.name != name}
    for model in models:
        if model != name and model in names:
            raise BadRequest(
                f"{model!r} is a route: a target is a model, routes are not followed twice", param="targets"
            )
    for other in others:
        if other.name != name and name in {target.model for target in other.targets}:
            raise BadRequest(
                f"{name!r} is a target of the route {other.name!r}: routes are not followed twice",
                param="name",
            )


def _check_target(target: Target, param: str) -> None:
    _check_name(target.model, f"{param}.model")
    if not 0.0 <= target.weight <= MAX_WEIGHT:  # refuses NaN, too
        raise BadRequest(f"a weight is from 0 to {MAX_WEIGHT:.0f}", param=f"{param}.weight")
    if (target.when is When.SLOWER_THAN) != (0.0 < target.slower_than_s < inf):
        raise BadRequest(
            "slower_than_s, seconds above 0, belongs to when 'slower_than'", param=f"{param}.slower_than_s"
        )


def _check_name(name: str, param: str) -> None:
    if not 0 < len(name) <= MAX_NAME_CHARS or not name.isprintable() or name != name.strip():
        raise BadRequest(f"{param} has 1 to {MAX_NAME_CHARS} characters that can be printed", param=param)
