"""Tenants, keys and quotas by the admin API and the command line, on real databases; every change audited."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import time
from pathlib import Path
from typing import Any

import httpx2
import pytest
from sqlalchemy import insert

from gateway.admin.access import Access
from gateway.admin.tenancy import tenancy_routes
from gateway.http.app import create_http
from gateway.http.backend import Backend, Readiness
from gateway.quotas.limits import Kind, Scope
from gateway.quotas.meter import month_of
from gateway.store.audit import Act
from gateway.store.store import Store, open_store
from gateway.store.tables import quota_slices
from tests.support.command_line import run
from tests.support.fakes.edge import error_of, scripted
from tests.support.fakes.store import outcome


def admin_api(store: Store, secret: str) -> httpx2.AsyncClient:
    backend = Backend(
        answer=scripted("x"),
        models=list,
        authenticate=store.keys.authenticate,
        ready=lambda: Readiness(True, ""),
        version="1",
    )
    access = Access(backend, store.keys.still_valid, store.keys.session_key)
    transport = httpx2.ASGITransport(create_http(backend, tenancy_routes(access, store)))
    headers = {"authorization": f"Bearer {secret}"}
    return httpx2.AsyncClient(transport=transport, base_url="http://gateway", headers=headers)


async def post(client: httpx2.AsyncClient, path: str, status: int = 200, **body: Any) -> dict[str, Any]:
    response = await client.post(f"/admin/api/{path}", json=body)
    assert response.status_code == status, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def get(client: httpx2.AsyncClient, path: str) -> dict[str, Any]:
    response = await client.get(f"/admin/api/{path}")
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def test_the_admin_api_makes_rotates_and_revokes_keys_and_audits_it(url: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with open_store(url, tmp_path) as store:
            boss, secret = await store.keys.create_key("boss", admin=True)
            async with admin_api(store, secret) as client:
                made = await post(
                    client, "keys", name="app", tenant="shop", regions=["eu"], models=["m"], reason="launch"
                )
                caller = store.keys.authenticate(made["key"])
                assert caller is not None
                assert (caller.tenant, caller.regions, caller.models) == ("shop", {"eu"}, {"m"})
                new = await post(client, f"keys/{made['id']}/rotate", overlap_s=600, reason="yearly")
                both = [store.keys.authenticate(each["key"]) for each in (made, new)]
                assert [each and each.quota_id for each in both] == [made["id"]] * 2
                assert both[1] is not None and both[1].regions == {"eu"}
                await post(client, f"keys/{made['id']}/revoke", reason="leaked")
                assert store.keys.authenticate(made["key"]) is None
                assert store.keys.authenticate(new["key"]) is not None
                listed = await get(client, "keys")
                assert {key["id"] for key in listed["keys"]} == {boss.id, made["id"], new["id"]}
                assert made["key"] not in json.dumps(listed)
                entries = (await get(client, "audit?limit=3"))["entries"]
                found = [(each["action"], each["reason"], each["who"]) for each in entries]
                who = f"boss ({boss.id})"
                assert sorted(found) == sorted(
                    [
                        (f"create key {made['id']}", "launch", who),
                        (f"rotate key {made['id']}", "yearly", who),
                        (f"revoke key {made['id']}", "leaked", who),
                    ]
                )

    asyncio.run(main())


def test_keys_are_listed_a_page_at_a_time(url: str, tmp_path: Path) -> None:
    """10,000 keys at once held the event loop 0.1 s and longer; there may be a million."""

    async def main() -> None:
        async with open_store(url, tmp_path) as store:
            made = [await store.keys.create_key("boss", admin=True) for _ in range(5)]
            ids = [key.id for key, _ in sorted(made, key=lambda each: (each[0].created_at, each[0].id))][::-1]
            async with admin_api(store, made[0][1]) as client:
                assert await in_pages(client, "keys", "id") == ids
                assert [key["id"] for key in (await get(client, "keys"))["keys"]] == ids
                for wrong in ("after=key_of_nobody", "limit=1001"):
                    assert (await client.get(f"/admin/api/keys?{wrong}")).status_code == 400

    asyncio.run(main())


async def in_pages(client: httpx2.AsyncClient, kind: str, by: str) -> list[str]:
    """Return what is listed, two at a time; the last page must have one."""
    seen, after = list[str](), ""
    while True:
        page = await get(client, f"{kind}?limit=2{after}")
        seen += [each[by] for each in page[kind]]
        after = f"&after={seen[-1]}"
        if not page["has_more"]:
            assert len(page[kind]) == 1
            return seen


def test_tenants_are_listed_a_page_at_a_time_by_name(url: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with open_store(url, tmp_path) as store:
            _, secret = await store.keys.create_key("boss", admin=True)
            async with admin_api(store, secret) as client:
                for name in ("shop", "lab", "Zoo", "bank"):
                    await post(client, "tenants", name=name, reason="new")
                listed = [each["name"] for each in (await get(client, "tenants"))["tenants"]]
                assert sorted(listed) == ["Zoo", "bank", "default", "lab", "shop"]
                assert await in_pages(client, "tenants", "name") == listed
                assert (await client.get("/admin/api/tenants?limit=1001")).status_code == 400

    asyncio.run(main())


def test_the_admin_api_sets_quotas_and_says_what_was_before(url: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with open_store(url, tmp_path) as store:
            _, secret = await store.keys.create_key("boss", admin=True)
            async with admin_api(store, secret) as client:
                tenant = {"scope": "tenant", "subject": "shop"}
                await post(client, "quotas", 404, **tenant, limits={"tokens_per_min": 5}, reason="x")
                await post(client, "tenants", name="shop", best_priority=-3, reason="pays more")
                limits = {"tokens_per_min": 1e3, "concurrent_queries": 4}
                await post(client, "quotas", **tenant, limits=limits, reason="contract")
                left = await post(
                    client, "quotas", **tenant, limits={"tokens_per_min": None}, reason="renewed"
                )
                assert [(each["kind"], each["amount"]) for each in left["quotas"]] == [
                    ("concurrent_queries", 4)
                ]
                assert (await get(client, "quotas"))["quotas"] == left["quotas"]
                (entry, *_) = (await get(client, "audit"))["entries"]
                assert entry["before"] == "concurrent_queries 4; tokens_per_min 1000"
                assert entry["after"] == "concurrent_queries 4"
                names = [each["name"] for each in (await get(client, "tenants"))["tenants"]]
                assert names == ["default", "shop"]
                made = await post(client, "keys", name="app", tenant="shop", reason="launch")
                caller = store.keys.authenticate(made["key"])
                assert caller is not None and caller.best_priority == -3
                await post(client, "tenants", name="shop", best_priority=2, reason="pays less")
                await store.keys.refresh()
                caller = store.keys.authenticate(made["key"])
                assert caller is not None and caller.best_priority == 2
                for by in ("tenant", "model", "site", "cloud"):
                    assert await get(client, "spending") == {"today": [], "month": []}
                    assert (await get(client, f"usage?by={by}&days=1")) == {
                        "by": by,
                        "usage": [],
                        "idle_usd": 0,
                    }

    asyncio.run(main())


def test_the_quotas_of_which_most_is_used_come_first_and_a_list_has_an_end(url: str, tmp_path: Path) -> None:
    """A page that is open asks every 10 s: 10,000 rows, and twice as many slices, held the loop 0.15 s."""
    month = month_of(time.time())

    async def main() -> None:
        async with open_store(url, tmp_path) as store:
            _, secret = await store.keys.create_key("boss", admin=True)
            slices = []
            for name, amount, used in (("a", 10, 0), ("b", 0, 0), ("c", 1_000, 600), ("d", 10, 9)):
                await store.quotas.set_tenant(name, best_priority=0, act=Act("ops"))
                await store.quotas.set_quotas(Scope.TENANT, name, {Kind.MONTH: amount}, Act("ops"))
                row = {"scope": Scope.TENANT, "subject": name, "kind": Kind.MONTH, "used_at": 0.0, "want": 0}
                row |= {"amount": used, "used": used}
                slices += [row | {"replica": each, "period": month} for each in ("one", "two")[: used // 5]]
                slices += [row | {"replica": "gone", "period": month - 1}]
            async with store.quotas._engine.begin() as connection:
                await connection.execute(insert(quota_slices), slices)
            async with admin_api(store, secret) as client:
                first = await get(client, "quotas?limit=3")
                assert [(each["subject"], each["in_use"]) for each in first["quotas"]] == [
                    ("c", 1_200),
                    ("b", 0),
                    ("d", 9),
                ]
                assert first["has_more"]
                assert [each["subject"] for each in (await get(client, "quotas"))["quotas"]] == [*"cbda"]
                assert not (await get(client, "quotas?limit=4"))["has_more"]
                assert (await client.get("/admin/api/quotas?limit=0")).status_code == 400
            by_name = await store.quotas.quotas()
            assert [(each.id.subject, each.in_use) for each in by_name] == [
                ("a", 0),
                ("b", 0),
                ("c", 1_200),
                ("d", 9),
            ]

    asyncio.run(main())


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("keys", {"name": "x"}, "reason"),
        ("keys", {"name": "", "reason": "x"}, "name"),
        (
            "quotas",
            {"scope": "tenant", "subject": "a", "limits": {"tokens_per_min": -1}, "reason": "x"},
            None,
        ),
        (
            "quotas",
            {"scope": "tenant", "subject": "a", "limits": {"tokens_per_min": 0.5}, "reason": "x"},
            "limits.tokens_per_min",
        ),
        (
            "quotas",
            {"scope": "tenant", "subject": "a", "limits": {"tokens_per_min": 10**400}, "reason": "x"},
            None,
        ),
        ("quotas", {"scope": "team", "subject": "a", "limits": {}, "reason": "x"}, None),
        ("tenants", {"name": "x", "best_priority": 2**40, "reason": "x"}, "best_priority"),
        ("keys", {"name": "x", "days": -1, "reason": "x"}, "days"),
        ("keys", {"name": "x", "days": 0, "reason": "x"}, "days"),
        ("keys", {"name": "x", "days": 1e308, "reason": "x"}, "days"),
        ("keys", {"name": "x", "reason": "\0"}, "reason"),
        ("keys", {"name": "x", "models": [""], "reason": "x"}, "models"),
        ("keys", {"name": "x", "regions": ["eu", "y" * 201], "reason": "x"}, "regions"),
    ],
)
def test_what_makes_no_sense_is_refused_and_nothing_changes(
    path: str, body: dict[str, Any], param: str | None, tmp_path: Path, sqlite_template: Path
) -> None:
    async def main() -> None:
        shutil.copy(sqlite_template, tmp_path / "mico.db")
        async with open_store(f"sqlite:///{tmp_path}/mico.db", tmp_path) as store:
            _, secret = await store.keys.create_key("boss", admin=True)
            _, other = await store.keys.create_key("user")
            before = len(await store.orders.entries(100))
            async with admin_api(store, secret) as client:
                refusal = (await post(client, path, 400, **body))["error"]
                assert param is None or refusal["param"] == param
            async with admin_api(store, other) as client:
                await post(client, path, 403, **body)
            assert len(await store.orders.entries(100)) == before

    asyncio.run(main())


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("usage?days=nan", "days"),
        ("usage?days=inf", "days"),
        ("usage?days=-5", "days"),
        ("usage?by=colour", "by"),
        ("audit?limit=" + "9" * 5000, "limit"),
        ("audit?limit=0", "limit"),
    ],
)
def test_a_look_that_makes_no_sense_is_refused(
    path: str, param: str, tmp_path: Path, sqlite_template: Path
) -> None:
    async def main() -> None:
        shutil.copy(sqlite_template, tmp_path / "mico.db")
        async with open_store(f"sqlite:///{tmp_path}/mico.db", tmp_path) as store:
            _, secret = await store.keys.create_key("boss", admin=True)
            async with admin_api(store, secret) as client:
                assert error_of(await client.get(f"/admin/api/{path}"), 400)["param"] == param

    asyncio.run(main())


def test_what_no_database_keeps_is_the_operators_mistake(url: str, tmp_path: Path) -> None:
    """The answer is a client error, not that the database is away."""

    async def main() -> None:
        async with open_store(url, tmp_path) as store:
            _, secret = await store.keys.create_key("boss", admin=True)
            async with admin_api(store, secret) as client:
                none = {"scope": "tenant", "subject": "a\0b", "limits": {"tokens_per_min": 1}, "reason": "x"}
                for path, body in (("quotas", none), ("keys/a%00b/revoke", {"reason": "x"})):
                    response = await client.post(f"/admin/api/{path}", json=body)
                    assert response.status_code in (400, 404), response.text
                made = await post(client, "keys", name="app", reason="a\0b\u200b c\n d")
                (entry, *_) = (await get(client, "audit?limit=1"))["entries"]
                assert (entry["action"], entry["reason"]) == (f"create key {made['id']}", "ab c d")

    asyncio.run(main())


def test_a_rotated_key_lives_as_long_as_the_first_did_and_a_dead_one_is_not_rotated(
    url: str, tmp_path: Path
) -> None:
    async def main() -> None:
        async with open_store(url, tmp_path) as store:
            old, secret = await store.keys.create_key("app", expires_at=time.time() + 1_000)
            rotated = await store.keys.rotate_key(old.id, 0.0)
            assert rotated is not None
            assert store.keys.authenticate(secret) is None
            assert rotated[0].expires_at == pytest.approx(time.time() + 1_000, abs=60)
            again = await store.keys.rotate_key(rotated[0].id, 60.0)
            assert again is not None and again[0].first_id == old.id
            await store.keys.revoke_key(again[0].id)
            assert await store.keys.rotate_key(again[0].id, 60.0) is None
            assert await store.keys.rotate_key("key_of_nobody", 60.0) is None

    asyncio.run(main())


@pytest.mark.parametrize("lasts_s", [None, 1_000_000.0])
def test_a_key_that_is_rotated_again_gives_the_new_one_its_own_length_of_life(
    url: str, tmp_path: Path, lasts_s: float | None
) -> None:
    """As when the answer to the first rotation was lost: by then the key ends with its overlap."""

    async def main() -> None:
        async with open_store(url, tmp_path, serving=False) as store:
            expires_at = None if lasts_s is None else time.time() + lasts_s
            old, _ = await store.keys.create_key("app", expires_at=expires_at)
            for _ in range(2):
                rotated = await store.keys.rotate_key(old.id, 60.0)
                assert rotated is not None
                if lasts_s is None:
                    assert rotated[0].expires_at is None
                else:
                    assert rotated[0].expires_at == pytest.approx(time.time() + lasts_s, abs=60)

    asyncio.run(main())


def test_a_key_of_another_pepper_is_not_replaced_by_one_that_no_gateway_takes(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`mico keys rotate` made such a key where the pepper was another, and ended the old one."""

    def mico(folder: str, *arguments: str) -> tuple[int, str, str]:
        return run(capsys, "--folder", str(tmp_path / folder), "keys", *arguments, "--database", url)

    _, made, said = mico("gateways", "create", "app", "--json")
    assert "warning" not in said
    key = json.loads(made)["id"]
    status, _, refused = mico("elsewhere", "rotate", key, "--overlap", "0s")
    assert status == 1
    assert f"{key} was made with another pepper" in refused and "MICO_GATEWAY_KEY_PEPPER" in refused
    _, listed, _ = mico("gateways", "list", "--json")
    assert [(each["id"], each["state"]) for each in json.loads(listed)] == [(key, "ready")]
    status, _, said = mico("elsewhere", "create", "other")
    assert status == 0
    assert "warning: every key there is was made with another pepper" in said
    assert mico("gateways", "rotate", key, "--overlap", "0s")[0] == 0


def test_the_command_line_has_the_same_verbs(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def mico(*arguments: str, status: int = 0) -> Any:
        done, out, err = run(capsys, "--folder", str(tmp_path), *arguments, "--database", url, "--json")
        assert (done == 0) == (status == 0), out + err
        return json.loads(out) if done == 0 else err

    key = mico("keys", "create", "app", "--tenant", "shop", "--region", "eu", "--reason", "launch")
    assert key["regions"] == ["eu"]
    mico("tenants", "set", "shop", "--best-priority", "-1")
    assert mico("tenants", "set", "shop")["best_priority"] == -1, "what is left out stays as it is"
    assert mico("tenants", "set", "lab")["best_priority"] == 0
    assert [tenant["name"] for tenant in mico("tenants", "list")] == ["lab", "shop"]
    mico("quotas", "set", "--tenant", "shop", "--tokens-per-min", "5000", "--concurrent-queries", "7")
    new = mico("keys", "rotate", key["id"], "--overlap", "1h")
    mico("quotas", "set", "--key", new["id"], "--requests-per-min", "60")
    listed = {(row["scope"], row["subject"], row["kind"]): row["amount"] for row in mico("quotas", "list")}
    assert listed == {
        ("key", key["id"], "requests_per_min"): 60,
        ("tenant", "shop", "concurrent_queries"): 7,
        ("tenant", "shop", "tokens_per_min"): 5000,
    }
    mico("quotas", "set", "--tenant", "shop", "--tokens-per-min", "none")
    assert len(mico("quotas", "list")) == 2
    mico("quotas", "set", "--tenant", "shop", status=1)
    mico("quotas", "set", "--tenant", "shop", "--tokens-per-min", "many", status=1)
    refused = mico("quotas", "set", "--tenant", "nobody", "--tokens-per-min", "5", status=1)
    assert "there is no tenant 'nobody'" in refused
    mico("keys", "revoke", new["id"], "--reason", "\ndone\n")

    audited = mico("audit")
    assert sorted(entry["action"].split()[0] for entry in audited) == [
        *("create", "revoke", "rotate"),
        *["set"] * 6,
    ]
    assert (audited[0]["reason"], audited[0]["before"], audited[0]["after"]) == ("done", "valid", "revoked")
    assert mico("audit", "--limit", "1") == audited[:1]

    async def answer() -> None:
        async with open_store(url, tmp_path) as store:
            store.recorder.record(outcome("old", received_at=time.time() - 10 * 86_400), "gcp")
            store.recorder.record(outcome("new", received_at=time.time()), "aws")
            assert await store.recorder.flush()

    asyncio.run(answer())
    of_aws = {"name": "aws", "queries": 1, "prompt_tokens": 12, "completion_tokens": 34}
    assert mico("usage", "--by", "cloud", "--days", "1") == [of_aws]
    assert mico("usage", "--by", "cloud") == [of_aws, {**of_aws, "name": "gcp"}]
    assert [row["name"] for row in mico("usage")] == ["default"]
    mico("usage", "--by", "colour", status=1)
    _, told, _ = run(capsys, "--folder", str(tmp_path), "explain", "new", "--database", url)
    assert "forecast by histogram: " in told and "nine in ten within" in told
    assert re.search(r"report age .*\n.*aws/one .* 50 ms ", told)
    assert "were in its cache" in told
