"""Quotas over replicas whose clocks are wrong, one of which is killed; and the end of a month under load."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any

from sqlalchemy import select

from bench.support import moved_clock
from bench.support.tenant_scene import (
    ACT,
    ANSWER_TOKENS,
    PEPPER,
    PROMPT_TOKENS,
    Answered,
    Scene,
    most_in_a_minute,
    new_key,
    scene,
)
from gateway.quotas.limits import Kind, Scope
from gateway.quotas.meter import month_of, month_start
from gateway.store.database import open_engine
from gateway.store.store import open_store
from gateway.store.tables import usage

SKEWS_S = (90.0, -90.0)
CHARS_PER_TOKEN = 4


async def shares_part(limit: int = 6_000, load_s: float = 65.0) -> dict[str, Any]:
    """Ask one replica for most of an unused quota, and all for three times a quota, while one is killed."""
    found = {f"{count}_replicas": await _shares(count, limit, load_s) for count in (2, 4)}
    return {**found, "kept": all(each["kept"] for each in found.values())}


async def _shares(count: int, limit: int, load_s: float) -> dict[str, Any]:
    async with scene(count, skews_s=SKEWS_S) as here:
        keys = {
            tenant: await _tenant(here, tenant, {Kind.TOKENS: limit}) for tenant in ("idle", "busy", "late")
        }
        await asyncio.sleep(3.0)  # the replicas have read their quotas
        large = await _ask_for_most(here, keys["idle"], limit)
        per_s = 3 * limit / 60 / (PROMPT_TOKENS + ANSWER_TOKENS)
        load = asyncio.create_task(here.offer(keys["busy"], per_s, round(per_s * load_s)))
        await asyncio.sleep(load_s / 3)
        killed = here.replicas[-1]
        await killed.end(kill=True)
        answers = await load
        here.replicas.remove(killed)
        after_kill = await _ask_for_most(here, keys["late"], limit)
        answered = [each for each in answers if each.status == 200]
        rows = await here.granted(len(answered), "busy")
        most, recorded = most_in_a_minute(rows), sum(tokens for _, tokens in rows)
        told = sum(each.tokens for each in answered)
        refused = [each for each in (*large, *after_kill) if each.status != 200]
        return {
            "quota_tokens_per_min": limit,
            "clocks_off_by_s": SKEWS_S,
            "asked_for_most_of_an_unused_quota": len(large) + len(after_kill),
            "refused_of_these": len(refused),
            "longest_wait_s": round(max(each.seconds for each in (*large, *after_kill)), 2),
            "most_granted_in_any_60_s": most,
            "part_of_the_quota": round(most / limit, 4),
            "statuses_under_load": dict(Counter(each.status for each in answers)),
            "reasons_of_5xx": dict(Counter(each.reason for each in answers if each.reason)),
            "tokens_answered": told,
            "tokens_recorded": recorded,
            "kept": not refused
            and 0.8 * limit <= most <= 1.05 * limit
            and told <= recorded <= told + 27 * count,
        }


async def _ask_for_most(here: Scene, key: str, limit: int, part: float = 0.85) -> list[Answered]:
    """Ask each replica in turn, one at a time, with a prompt that needs this part of the quota."""
    prompt = "w" * round(part * limit * CHARS_PER_TOKEN)
    answers = []
    for number in range(len(here.replicas)):
        answers.append(await here.ask(number, key, prompt))
        await asyncio.sleep(2.5)  # the next one is alone, too
    return answers


async def month_part(limit: int = 5_400) -> dict[str, Any]:
    """Spend a month's tokens at two replicas whose clocks are wrong, and the next month's when it begins."""
    ends_at = month_start(month_of(time.time()) + 1)
    ahead_s = ends_at - 300.0 - time.time()
    async with scene(2, skews_s=SKEWS_S, before=moved_clock.statements(ahead_s)) as here:
        key = await _tenant(here, "shop", {Kind.MONTH: limit})
        await asyncio.sleep(3.0)
        before = await _spend(here, key)
        ahead_s += await moved_clock.move_to(here.url, ends_at - 4.0, ahead_s)
        late = [await here.ask(number, key) for number in range(2)]
        await asyncio.sleep(max(0.0, ends_at + 2.0 - time.time() - ahead_s))
        after = await _spend(here, key)
        answered = [each for each in (*before, *late, *after) if each.status == 200]
        rows = await _usage(here, len(answered))
        months = {
            name: sum(tokens for at, tokens in rows.values() if (at < ends_at) == (name == "before"))
            for name in ("before", "after")
        }
        wrong = sum(rows.get(each.request_id, (0.0, 0))[1] != each.tokens for each in answered)
        refused = [each for each in (*before, *late, *after) if each.status == 429]
        charged = sum(rows.get(each.request_id, (0.0, 0))[1] for each in refused)
        return {
            "quota_tokens_per_month": limit,
            "clocks_off_by_s": SKEWS_S,
            "used_in_the_month_that_ends": months["before"],
            "used_in_the_next": months["after"],
            "answered": len(answered),
            "refused": len(refused),
            "answers_whose_row_is_missing_or_wrong": wrong,
            "tokens_charged_for_refusals": charged,
            "kept": wrong == charged == 0
            and all(0.9 * limit <= each <= 1.05 * limit for each in months.values()),
        }


async def _spend(here: Scene, key: str) -> list[Answered]:
    return await here.offer(key, 30.0, 300, first=len(here.answers))


async def _usage(here: Scene, expected: int) -> dict[str, tuple[float, int]]:
    """Return when each query was received and what it was charged, by request id."""
    await here.rows(expected)
    engine = open_engine(here.url)
    columns = usage.c.request_id, usage.c.received_at, usage.c.prompt_tokens + usage.c.completion_tokens
    async with engine.connect() as connection:
        found = {row[0]: (row[1], row[2]) for row in await connection.execute(select(*columns))}
    await engine.dispose()
    return found


async def _tenant(here: Scene, name: str, limits: dict[Kind, int]) -> str:
    _, key = await new_key(here, name)
    async with open_store(here.url, here.folder, pepper=PEPPER, serving=False) as store:
        await store.quotas.set_quotas(Scope.TENANT, name, limits, ACT)
    return key
