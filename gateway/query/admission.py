"""Who may ask what, before anything is forecast or decided. Pure: what is live is counted by the caller."""

from __future__ import annotations

from collections.abc import Collection

from gateway.domain import Query
from gateway.errors import Forbidden, ModelNotFound, NoSite, Overloaded

RETRY_AFTER_S = 1.0
TENANT_PARTS = 4
"""A tenant may have so many times what is free: alone four fifths of all, so that others always find room
(Choudhury and Hahne, Dynamic queue length thresholds for shared-memory packet switches, 1998).
"""


def admit(
    query: Query,
    *,
    models: Collection[str],
    live: int,
    of_tenant: int = 0,
    most_live: int,
    has_room: bool,
    complete: bool = True,
) -> None:
    """Raises NoSite, ModelNotFound, Forbidden or Overloaded; a query that passes will end exactly once.

    `live` queries are being answered now, `of_tenant` of them of this tenant, and at most `most_live` may be:
    memory is bounded, and no tenant fills it alone. `has_room`:
    whether what the query uses could be recorded; nothing is served that can't be. `complete`: whether every
    site that an earlier process of this gateway knew has had the time to join again.
    """
    if not models:  # a gateway that has just started can't know which models there are
        raise NoSite("no site has joined this gateway yet", retry_after_s=RETRY_AFTER_S)
    if query.model not in models and not complete:
        raise NoSite(
            f"no site that serves {query.model[:100]!r} has joined yet; this gateway has just started",
            retry_after_s=RETRY_AFTER_S,
        )
    if query.model not in models:
        known = ", ".join(sorted(filter(query.caller.may_use, models))[:10]) or "none for this key"
        raise ModelNotFound(
            f"the model {query.model[:100]!r} does not exist; served here: {known}", param="model"
        )
    if not query.caller.may_use(query.model):
        raise Forbidden(f"this key may not use the model {query.model!r}", param="model")
    if not has_room:
        raise Overloaded("the database is away and the journal of usage is full", retry_after_s=RETRY_AFTER_S)
    if live >= most_live:
        raise Overloaded(
            f"{live} queries are being answered, the most allowed here", retry_after_s=RETRY_AFTER_S
        )
    if of_tenant > TENANT_PARTS * (most_live - live):
        raise Overloaded(
            f"{of_tenant} queries of {query.caller.tenant} are being answered, and there is little room left",
            retry_after_s=RETRY_AFTER_S,
        )
