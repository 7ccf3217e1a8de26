"""Choose the targets of a query's route: the first one, and those that stand in for it, in order.

A query without a route has only its own model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from copy import copy

from msgspec.structs import replace

from gateway.domain import Caller, Model, Query
from gateway.errors import BadRequest, ContextTooLong, Forbidden, MicoError, NoSite
from gateway.prompt import least_chars
from gateway.query.admission import RETRY_AFTER_S, exists_for
from gateway.query.context import QueryContext
from gateway.routing.decide import decide
from gateway.routing.demand import Demand
from gateway.routing.model_routes import ModelRoute, Prospect, Target, draw, in_order, route_models, stand_in
from gateway.routing.prefixes import NOTHING_CACHED


class Targets:
    """The targets of one query that are not tried yet. A change of target drops its preferred site."""

    __slots__ = ("_error", "_left")

    def __init__(self) -> None:
        self._left: list[Target] = []
        self._error: MicoError | None = None  # error of the first target, the one reported to the client

    @property
    def are_left(self) -> bool:
        return bool(self._left)

    def begin(self, query: Query, context: QueryContext) -> Query:
        """Return the query with its first target as model. Raises the errors of `targets_of`."""
        route = None if query.asked_model else context.routes().get(query.model)
        if route is None:
            return query
        models, drawn = context.directory.models, draw(_draw_key(query.id))
        first, *self._left = targets_of(query, route, models, drawn, fleet_complete=context.fleet_complete)
        return _sent_to(query, first)

    def stand_in(self, query: Query, prospect: Callable[[str], Prospect]) -> Query | None:
        """Return the query with a target that stands in for its overloaded or slow model; None if none does.

        The replaced target becomes the first of those left.
        """
        target = stand_in(query.model, self._left, prospect)
        if target is None:
            return None
        self._left = [Target(query.model), *(each for each in self._left if each is not target)]
        return _sent_to(query, target)

    def after(self, error: MicoError, query: Query, models: Mapping[str, Model]) -> Query:
        """Return the query with its next target, after `error`. Raises the first target's error if none is
        left. After ContextTooLong, targets whose context is not longer are skipped.
        """
        self._error = self._error or copy(error)  # a copy, as the traceback of `error` refers to this object
        while self._left:
            target = self._left.pop(0)
            is_too_short = isinstance(error, ContextTooLong) and (
                _context_tokens(target, models) <= _context_tokens(query, models)
            )
            if not is_too_short:
                return _sent_to(query, target)
        raise copy(self._error)


class NamedModels:
    """The models that sites serve now, and the routes to them as models. Rebuilt when either changes.

    `also_away`: include models of sites that are down, to check the features that requests need.
    """

    def __init__(self, context: QueryContext, *, also_away: bool = False) -> None:
        self._context = context
        self._also_away = also_away
        self._made_of: tuple[object, object] | None = None
        self._models: list[Model] = []

    def __call__(self) -> list[Model]:
        directory, routes = self._context.directory, self._context.routes()
        served = directory.models if self._also_away else directory.served
        if self._made_of is None or self._made_of[0] is not served or self._made_of[1] is not routes:
            own = {name: model for name, model in served.items() if name not in routes}
            self._models = [*own.values(), *route_models(routes, served).values()]
            self._made_of = served, routes
        return self._models


def targets_of(
    query: Query,
    route: ModelRoute,
    models: Mapping[str, Model],
    drawn: float,
    *,
    needs: frozenset[str] = frozenset(),
    fleet_complete: bool,
) -> list[Target]:
    """Return the targets that could answer the query, in order; at least one.

    Excludes targets that the key may not use, that no listed site serves, or that lack a feature. Also
    excludes targets whose context is too short for the prompt or the answer, unless all are. Raises
    Forbidden, NoSite or BadRequest if none is left. `fleet_complete` as in `admission.check_model`.
    """
    allowed = [target for target in route.targets if query.caller.may_use(target.model)]
    if not any(target.weight > 0 for target in allowed):
        raise Forbidden(f"this key may not use the model {route.name!r}", param="model")
    tenant = query.caller.tenant
    served = [each for each in allowed if each.model in models and models[each.model].tenant in ("", tenant)]
    known = in_order(served, drawn)
    if not known:
        raise NoSite(f"no site serves a model of {route.name!r} now", retry_after_s=RETRY_AFTER_S)
    needed = query.needs | needs
    able = [target for target in known if needed <= models[target.model].features]
    if not able and not fleet_complete:
        raise NoSite(
            f"no site for {route.name!r} has joined yet that has all of: {', '.join(sorted(needed))}",
            retry_after_s=RETRY_AFTER_S,
        )
    if not able:
        raise BadRequest(
            f"No model behind {route.name} has all of: {', '.join(sorted(needed))}."
            " /v1/models lists what models can do.",
            param="model",
        )
    return [target for target in able if _is_long_enough(models[target.model], query)] or able


def model_of_batch(name: str, batch_id: str, caller: Caller | None, context: QueryContext) -> str:
    """Return the model for the lines of a batch now: for a route, its first target that ready sites serve."""
    route = context.routes().get(name)
    if route is None or caller is None:
        return name
    served = context.directory.served
    usable = [each for each in route.targets if each.model in served and caller.may_use(each.model)]
    able = [each for each in usable if exists_for(caller, served[each.model])]
    return next((each.model for each in in_order(able, draw(_draw_key(batch_id)))), name)


def prospect_of(demand: Demand, model: str, context: QueryContext) -> Prospect:
    """Return how soon the sites of a model would begin a demand, by the estimates kept with a decision."""
    if model != demand.model:
        demand = dataclasses.replace(demand, model=model, cached=NOTHING_CACHED)
    placed = decide(demand, context.directory.fleet, context.policy, now_s=context.clock(), turn=0)
    if placed.site is None:
        return Prospect()
    waits, firsts = zip(*((each.wait_s, each.first_token_s) for each in placed.estimates), strict=True)
    return Prospect(min(waits), min(firsts))


def _sent_to(query: Query, target: Target) -> Query:
    asked = query.asked_model or query.model
    site = query.preferred_site if not query.asked_model else None
    return replace(query, model=target.model, asked_model=asked, preferred_site=site)


def _draw_key(query_id: str) -> str:
    """Return the key that the target is drawn by, which the queries of one request or batch share."""
    return query_id.partition("-")[0]


def _is_long_enough(model: Model, query: Query) -> bool:
    if model.context_tokens <= 0:  # unknown
        return True
    prompt, max_tokens = query.prompt, query.sampling.max_tokens or 0
    prompt_tokens = len(prompt) if isinstance(prompt, tuple) else 0
    fits = not model.max_prompt_chars or least_chars(prompt) <= model.max_prompt_chars
    return fits and prompt_tokens < model.context_tokens and max_tokens <= model.context_tokens


def _context_tokens(of: Target | Query, models: Mapping[str, Model]) -> int:
    return models[of.model].context_tokens if of.model in models else 0
