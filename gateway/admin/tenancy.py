"""Serve tenants, keys, quotas, usage and the audit below `/admin/api`, for `mico tenants | keys | quotas`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import msgspec
from litestar import get, post
from litestar.handlers import HTTPRouteHandler
from sqlalchemy.exc import DataError, SQLAlchemyError

from gateway.admin.access import Access, AnyRequest
from gateway.errors import BadRequest, NotFound, Overloaded
from gateway.http.body import decode_as
from gateway.http.error_handler import database_errors
from gateway.http.pagination import read_page
from gateway.operator_orders import clean_reason
from gateway.prices import NANO_USD
from gateway.quotas.limits import Kind, Scope
from gateway.store.audit import Act
from gateway.store.database import reason
from gateway.store.errors import OtherPepper, TooManyKeys
from gateway.store.key_table import NAME_RULE, KeyInfo, is_valid_name
from gateway.store.queries import total_by
from gateway.store.quota_table import MAX_AMOUNT, Quota, UnknownSubject
from gateway.store.spending import CloudSpending, spending, total_facts
from gateway.store.store import Store

T = TypeVar("T")
DAY_S = 86_400.0
DEFAULT_ENTRIES, MAX_ENTRIES = 100, 1_000
MAX_DAYS = 36_500
OVERLAP_S = 86_400.0


class NewKey(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    tenant: str = "default"
    models: list[str] | None = None
    regions: list[str] | None = None
    admin: bool = False
    days: float | None = None
    reason: str = ""


class Rotation(msgspec.Struct, forbid_unknown_fields=True):
    overlap_s: float = OVERLAP_S
    reason: str = ""


class Reason(msgspec.Struct, forbid_unknown_fields=True):
    reason: str = ""


class NewTenant(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    best_priority: int | None = None
    reason: str = ""


class NewQuotas(msgspec.Struct, forbid_unknown_fields=True):
    """New quotas of a tenant or a key. `limits` maps kinds to amounts, whole numbers except for dollars. null
    lifts a limit; kinds that are not named keep theirs.
    """

    scope: Scope
    subject: str
    limits: dict[Kind, int | float | None]
    reason: str = ""


def tenancy_routes(access: Access, store: Store) -> list[HTTPRouteHandler]:
    changes = [*_key_routes(access, store), *_quota_routes(access, store)]
    return [*_list_routes(access, store), *changes, *_record_routes(access, store)]


def _list_routes(access: Access, store: Store) -> list[HTTPRouteHandler]:
    @get("/admin/api/keys")
    async def list_keys(request: AnyRequest) -> dict[str, Any]:
        """List at most `limit` keys, newest first; those that follow the key `after`, if it is given."""
        await access.operator(request)
        page = read_page(request, MAX_ENTRIES, MAX_ENTRIES)
        with database_errors(page):
            found = await store.keys.list_newest(page.limit + 1, page.after)
        return {
            "keys": [key_facts(each) for each in found[: page.limit]],
            "has_more": len(found) > page.limit,
        }

    @get("/admin/api/tenants")
    async def list_tenants(request: AnyRequest) -> dict[str, Any]:
        """List at most `limit` tenants by name; those that follow the name `after`, if it is given."""
        await access.operator(request)
        page = read_page(request, MAX_ENTRIES, MAX_ENTRIES)
        async with translated_errors():
            found = await store.quotas.tenants(page.limit + 1, page.after)
        return {
            "tenants": msgspec.to_builtins(found[: page.limit]),
            "has_more": len(found) > page.limit,
        }

    @get("/admin/api/quotas")
    async def list_quotas(request: AnyRequest) -> dict[str, Any]:
        """List at most `limit` quotas, those with the largest used share first."""
        await access.operator(request)
        limit = read_page(request, MAX_ENTRIES, MAX_ENTRIES).limit
        async with translated_errors():
            found = await store.quotas.most_used(limit + 1)
        return {"quotas": [quota_facts(each) for each in found[:limit]], "has_more": len(found) > limit}

    return [list_keys, list_tenants, list_quotas]


def _key_routes(access: Access, store: Store) -> list[HTTPRouteHandler]:
    @post("/admin/api/keys", status_code=200)
    async def create_key(request: AnyRequest) -> dict[str, Any]:
        who = (await access.acting_operator(request)).who
        new = await body_of(request, NewKey)
        _check_names(new)
        expires_at = None if new.days is None else store.clock() + checked_days(new.days) * DAY_S
        async with translated_errors():
            key, secret = await store.keys.create_key(
                new.name,
                new.tenant,
                models=new.models,
                regions=new.regions,
                admin=new.admin,
                expires_at=expires_at,
                act=act(who, new.reason),
            )
        return {**key_facts(key), "key": secret}

    @post("/admin/api/keys/{key_id:str}/rotate", status_code=200)
    async def rotate_key(request: AnyRequest) -> dict[str, Any]:
        who, key_id = (await access.acting_operator(request)).who, request.path_params["key_id"]
        body = await body_of(request, Rotation)
        if not 0 <= body.overlap_s <= 365 * DAY_S:
            raise BadRequest("overlap_s is from 0 to a year", param="overlap_s")
        async with translated_errors():
            rotated = await store.keys.rotate_key(key_id, body.overlap_s, act(who, body.reason))
        if rotated is None:
            raise NotFound(f"there is no valid key {key_id!r}")
        return {**key_facts(rotated[0]), "key": rotated[1]}

    @post("/admin/api/keys/{key_id:str}/revoke", status_code=200)
    async def revoke_key(request: AnyRequest) -> dict[str, Any]:
        who, key_id = (await access.acting_operator(request)).who, request.path_params["key_id"]
        body = await body_of(request, Reason)
        async with translated_errors():
            key = await store.keys.revoke_key(key_id, act(who, body.reason))
        if key is None:
            raise NotFound(f"there is no key {key_id!r}")
        return key_facts(key)

    return [create_key, rotate_key, revoke_key]


def _quota_routes(access: Access, store: Store) -> list[HTTPRouteHandler]:
    @post("/admin/api/tenants", status_code=200)
    async def set_tenant(request: AnyRequest) -> dict[str, Any]:
        who = (await access.acting_operator(request)).who
        new = await body_of(request, NewTenant)
        if new.best_priority is not None and not -(2**31) <= new.best_priority < 2**31:
            raise BadRequest("best_priority is a 32-bit number", param="best_priority")
        async with translated_errors():
            set_to = await store.quotas.set_tenant(
                checked_name(new.name, "name"), best_priority=new.best_priority, act=act(who, new.reason)
            )
        facts: dict[str, Any] = msgspec.to_builtins(set_to)
        return facts

    @post("/admin/api/quotas", status_code=200)
    async def set_quotas(request: AnyRequest) -> dict[str, Any]:
        who = (await access.acting_operator(request)).who
        new = await body_of(request, NewQuotas)
        limits = {kind: _counted(kind, amount) for kind, amount in new.limits.items()}
        async with translated_errors():
            found = await store.quotas.set_quotas(new.scope, new.subject, limits, act(who, new.reason))
        return {"quotas": [quota_facts(quota) for quota in found]}

    return [set_tenant, set_quotas]


def _record_routes(access: Access, store: Store) -> list[HTTPRouteHandler]:
    clouds = CloudSpending(store.read, store.hours, store.clock)

    @get("/admin/api/usage")
    async def usage(request: AnyRequest) -> dict[str, Any]:
        """Sum usage and its cost `by` tenant, model, site or cloud, or several, over the last `days`."""
        await access.operator(request)
        by, days = request.query_params.get("by", "tenant"), request.query_params.get("days", "30")
        try:
            parts = total_by(by)
        except ValueError as exc:
            raise BadRequest(str(exc), param="by") from exc
        try:
            since = store.clock() - checked_days(float(days)) * DAY_S
        except ValueError as exc:
            raise BadRequest("days is a number", param="days") from exc
        async with translated_errors():
            found = await spending(store.read, store.hours, parts, since)
        rows = [total_facts(parts, each, found.idle_nano_usd) for each in found.totals]
        return {"by": by, "usage": rows, "idle_usd": found.all_idle_nano_usd / NANO_USD}

    @get("/admin/api/spending")
    async def cloud_spending(request: AnyRequest) -> dict[str, Any]:
        """Return what each cloud cost today and this month."""
        await access.operator(request)
        async with translated_errors():
            return await clouds.read()

    @get("/admin/api/audit")
    async def audit(request: AnyRequest) -> dict[str, Any]:
        await access.operator(request)
        limit = read_page(request, DEFAULT_ENTRIES, MAX_ENTRIES).limit
        async with translated_errors():
            return {"entries": msgspec.to_builtins(await store.orders.entries(limit))}

    return [usage, cloud_spending, audit]


@asynccontextmanager
async def translated_errors() -> AsyncIterator[None]:
    """Translate the store's errors: to NotFound, BadRequest, or Overloaded if the database is unavailable."""
    try:
        yield
    except UnknownSubject as exc:
        raise NotFound(str(exc)) from exc
    except (OtherPepper, TooManyKeys) as exc:
        raise BadRequest(str(exc)) from exc
    except DataError as exc:  # Postgres refuses NUL in a text
        raise BadRequest("a name has characters that no name here has: nothing was changed") from exc
    except (SQLAlchemyError, OSError) as exc:
        raise Overloaded(f"the database is away ({reason(exc)}): nothing was changed") from exc


async def body_of(request: AnyRequest, kind: type[T]) -> T:
    """Decode the JSON body; an empty one counts as {}. Raises BadRequest."""
    return decode_as(await request.body() or b"{}", kind, "the body is not understood")


def act(who: str, why: str) -> Act:
    """Return the author and reason of a change. Raises BadRequest without a reason."""
    text = clean_reason(why)
    if not text:
        raise BadRequest("Say why: the reason is kept in the audit.", param="reason")
    return Act(who, text)


def checked_days(days: float) -> float:
    """Return `days` if it is in range. Raises BadRequest."""
    if not 0 < days <= MAX_DAYS:
        raise BadRequest(f"days is above 0 and at most {MAX_DAYS}", param="days")
    return days


def checked_name(name: str, param: str) -> str:
    """Return `name` if it is valid. Raises BadRequest."""
    if not is_valid_name(name):
        raise BadRequest(f"{param} has {NAME_RULE}", param=param)
    return name


def _check_names(key: NewKey) -> None:
    """Raise BadRequest if the key, its tenant or one of its models or regions has an invalid name."""
    checked_name(key.name, "name"), checked_name(key.tenant, "tenant")
    for param, names in (("models", key.models), ("regions", key.regions)):
        for name in names or ():
            checked_name(name, param)


def key_facts(key: KeyInfo) -> dict[str, Any]:
    facts: dict[str, Any] = msgspec.to_builtins(key)
    return facts | {name: sorted(facts[name]) for name in ("models", "regions") if facts[name] is not None}


def _counted(kind: Kind, amount: float | None) -> int | None:
    """Convert an amount to the unit that is counted, nano-dollars for a budget. Raises BadRequest."""
    if amount is None:
        return None
    fits = 0 <= amount <= kind.shown(MAX_AMOUNT)
    if not (fits and (kind is Kind.BUDGET or amount == int(amount))):  # JSON writes 1000 as 1000.0, too
        what = "" if kind is Kind.BUDGET else "a whole number "
        most = f"{kind.shown(MAX_AMOUNT):.0f}"
        raise BadRequest(f"{kind.value} is {what}from 0 to {most}", param=f"limits.{kind.value}")
    return kind.counted(amount)


def quota_facts(quota: Quota) -> dict[str, Any]:
    return {
        "scope": quota.id.scope.value,
        "subject": quota.id.subject,
        "kind": quota.id.kind.value,
        "amount": quota.id.kind.shown(quota.amount),
        "in_use": quota.id.kind.shown(quota.in_use),
    }
