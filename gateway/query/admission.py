"""Admission control, before anything is forecast or decided. Pure: the caller counts the live queries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from gateway.domain import SHADOW_TENANT, Caller, Model, Query
from gateway.errors import Forbidden, ModelNotFound, NoSite, Overloaded
from gateway.memory_budget import TENANT_PARTS

RETRY_AFTER_S = 1.0


class Live(NamedTuple):
    """The number of queries in progress, and the bytes of memory that their prompts take."""

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
    """Raise the errors of `check_model`, or Overloaded if the gateway is at one of its limits.

    `live`: all queries in progress, with the prompt bytes of this one added. `tenant_live`: the tenant's
    queries, without this one. `max_live` bounds `live`. A tenant may have at most `TENANT_PARTS` times the
    free part of `max_live`, so that no tenant fills the memory alone. `has_room`: whether the query's outcome
    could be recorded; a query that could not be recorded is refused. `fleet_complete` as in `check_model`.
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
    """Return whether a model is public, or belongs to the caller's tenant.

    Shadow copies see every model: `Shadows` copies a query only to a model that its caller sees.
    """
    return model.tenant in ("", caller.tenant) or caller.tenant == SHADOW_TENANT


def check_model(query: Query, *, models: Mapping[str, Model], fleet_complete: bool) -> None:
    """Raise NoSite, ModelNotFound or Forbidden unless a listed site has the model and the caller may use it.

    Models of other tenants are reported as not existing. `fleet_complete`: whether every site that an earlier
    process of this gateway knew has had time to join again; until then a missing model is NoSite.
    """
    if not models:  # a gateway that has just started can't know which models exist
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
