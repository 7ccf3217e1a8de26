"""Compute the demand of a try: its needs, and the part of its prompt that sites are expected to cache."""

from __future__ import annotations

from dataclasses import replace

from gateway.query.context import QueryContext
from gateway.query.state import QueryState
from gateway.routing.demand import Demand
from gateway.routing.failover import Try
from gateway.routing.prefixes import MAX_HOLDERS, NOTHING_CACHED, Cached, prefix_of


def demand_of(
    context: QueryContext, state: QueryState, planned: Try, needs: frozenset[str] | None = None
) -> Demand:
    """Return the demand of a try. The first try's demand is computed once and kept in `state`.

    `needs`: the features required of the model; None means the query's own.
    """
    query = state.query
    if planned.number == 1 and state.first_demand is not None:
        return state.first_demand
    assert state.capped_forecast is not None, "a query is forecast before it is decided"
    demand = Demand.of(
        query.model,
        state.prompt_tokens or query.prompt_tokens_guess,
        state.capped_forecast,
        query.sampling,
        delivered=planned.resume.tokens if planned.resume else 0,
        lane=query.lane,
        needs=query.needs if needs is None else needs,
        regions=query.caller.regions,
        cached=_cached(context, state),
        limits=query.limits,
    )
    if planned.number == 1:
        state.first_demand = demand = context.traffic.arrive(demand, context.clock())
    elif state.first_demand is not None:
        demand = replace(demand, arriving=state.first_demand.arriving)
    return demand


def _cached(context: QueryContext, state: QueryState) -> Cached:
    """Return the share of the prompt that each site is expected to have in its cache."""
    query, fleet = state.query, context.directory.fleet
    if len(fleet.sites) < 2:
        return NOTHING_CACHED
    if state.prefix is None:
        state.prefix = prefix_of(query.prompt, query.caller.tenant, query.model, query.conversation)
    few = fleet.few_serving(query.model, query.needs, query.caller.regions, most=MAX_HOLDERS + 1)
    return context.prefixes.expected(state.prefix, few)
