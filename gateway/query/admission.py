"""Admission control, before anything is forecast or decided. Pure: the caller counts the live queries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from gateway.domain import SHADOW_TENANT, Caller, Model, Query
from gateway.errors import Forbidden, ModelNotFound, NoSite, Overloaded
from gateway.memory_budget import TENANT_PARTS

RETRY_AFTER_S = 1.0


class Live(NamedTuple):
    """Number of queries in progress, and the bytes that their prompts hold in memory."""

    queries: int = 0
    prompt_bytes: int = 0


NOTHING_LIVE = Live()


def admit(
    query: Query,
    *,
    models: Mapping[str, Model],
    live: Live,
    tenant_live: Live,
    max_live: Live,
    has_room: bool,
    fleet_complete: bool = True,
) -> None:
    """Raise what `check_model` raises, or Overloaded; a query that passes will end exactly once.

    `live`: all queries in progress, and the prompt of this one; `tenant_live`: those of its tenant, without
    it. `max_live` bounds `live`, and a tenant may have `TENANT_PARTS` times what is free, so that none fills
    the memory alone. `has_room`: whether the usage of the query could be recorded; nothing is served that
    cannot be. `fleet_complete` as in `check_model`.
    """
    check_model(query, models=models, fleet_complete=fleet_complete)
    if not has_room:
        raise Overloaded("the database is away and the journal of usage is full", retry_after_s=RETRY_AFTER_S)
    if live.queries >= max_live.queries:
        raise Overloaded(
            f"{live.queries} queries are being answered, the most allowed here", retry_after_s=RETRY_AFTER_S
        )
    if live.prompt_bytes > max_live.prompt_bytes:
        raise Overloaded("the prompts being answered fill the memory for them", retry_after_s=RETRY_AFTER_S)
    if any(
        own > TENANT_PARTS * (limit - used)
        for own, used, limit in zip(tenant_live, live, max_live, strict=True)
    ):
        raise Overloaded(
            f"{tenant_live.queries} queries of {query.caller.tenant} are being answered,"
            " and there is little room left",
            retry_after_s=RETRY_AFTER_S,
        )


def exists_for(caller: Caller, model: Model) -> bool:
    """Return whether a model is everyone's or the caller's own. Only its owner's queries are copied to it."""
    return model.tenant in ("", caller.tenant) or caller.tenant == SHADOW_TENANT


def check_model(query: Query, *, models: Mapping[str, Model], fleet_complete: bool) -> None:
    """Raise NoSite, ModelNotFound or Forbidden unless the caller may ask for the model, and a site has it.

    For a tenant there are no models of other tenants.

    `fleet_complete`: whether every site that an earlier process of this gateway knew has had the time to join
    again.
    """
    if not models:  # a gateway that has just started can't know which models there are
        raise NoSite("no site has joined this gateway yet", retry_after_s=RETRY_AFTER_S)
    model, caller = models.get(query.model), query.caller
    if model is not None and not exists_for(caller, model):
        model = None
    if model is None and not fleet_complete:
        raise NoSite(
            f"no site that serves {query.model[:100]!r} has joined yet; this gateway has just started",
            retry_after_s=RETRY_AFTER_S,
        )
    if model is None:
        own = [each for each in models.values() if exists_for(caller, each)]
        allowed = sorted(each.id for each in own if caller.may_ask(each))
        known = ", ".join(allowed[:10]) or "none for this key"
        raise ModelNotFound(
            f"the model {query.model[:100]!r} does not exist; served here: {known}", param="model"
        )
    if not caller.may_ask(model):
        raise Forbidden(f"this key may not use the model {query.model!r}", param="model")
