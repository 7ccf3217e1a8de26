"""The operator's API over the real core of a gateway and a real database: what it shows, what acts do."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any
from urllib.parse import quote

import httpx2
import pytest

from gateway.admin.access import COOKIE, SESSION_S
from gateway.admin.order_service import OrderService
from gateway.admin.routes import AdminContext, admin_routes
from gateway.admin.stream import columns_after, last_seen_seq, sse_event
from gateway.domain import AnswerEvent, Caller, Delta
from gateway.errors import NoSite
from gateway.http.app import create_http
from gateway.http.backend import Backend, Readiness
from gateway.query.answer import answer
from gateway.store.database import open_engine
from gateway.store.orders import OrderTable
from gateway.store.queries import Reads
from gateway.store.recorder import Recorder
from gateway.store.snapshots import SnapshotTable
from gateway.store.writer import DatabaseWriter
from gateway.telemetry.publisher import SnapshotPublisher
from gateway.telemetry.replicas import SummaryExchange
from gateway.telemetry.snapshot import Snapshot
from migrations import upgrade
from tests.support.fakes.edge import error_of
from tests.support.fakes.federation import DEADLINE_S, Scene, scene, until
from tests.support.fakes.store import outcome

ADMIN, USER = "admin-key", "user-key"
BEARER = {"authorization": f"Bearer {ADMIN}"}


@dataclass
class Replica:
    """One replica's operator side. `now` moves unix time; `callers` are the keys that are good now."""

    here: Scene
    publisher: SnapshotPublisher
    order_service: OrderService
    book: OrderTable
    http: httpx2.AsyncClient
    callers: dict[str, Caller]
    exchange: SummaryExchange
    recorder: Recorder
    shift_s: list[float] = field(default_factory=lambda: [0.0])

    async def act(self, site: str, verb: str, **body: Any) -> httpx2.Response:
        asked = {"reason": "a test", **body}
        return await self.http.post(f"/admin/api/sites/{site}/{verb}", json=asked, headers=BEARER)

    async def state(self, site: str) -> str:
        listed = (await self.http.get("/admin/api/sites", headers=BEARER)).json()["sites"]
        return str(next(each["state"] for each in listed if each["name"] == site))

    def pass_time(self, seconds: float) -> None:
        self.shift_s[0] += seconds


@asynccontextmanager
async def open_replica(here: Scene, url: str, name: str = "g1") -> AsyncIterator[Replica]:
    engine = open_engine(url)
    shift = [0.0]

    def unix_time() -> float:
        return time.time() + shift[0]

    callers = {ADMIN: Caller("key-a", "ops", admin=True), USER: Caller("key-u", "shop")}
    snapshots = SnapshotTable(engine)
    publisher = SnapshotPublisher(here.gateway.directory, name, unix_time=unix_time, history_store=snapshots)
    exchange = SummaryExchange(snapshots, name, publisher.summary, publisher.events.add, unix_time=unix_time)
    publisher.replica_summaries = lambda: exchange.summaries
    reads = Reads(engine)
    recorder = Recorder(Path(mkdtemp(dir=Path(str(engine.url.database)).parent)), DatabaseWriter(engine))
    await recorder.start()
    publisher.store_event = partial(recorder.record_event, replica=name)
    await publisher.restore_events(reads.events_of_replica)
    book = OrderTable(engine)
    order_service = OrderService(
        book, here.gateway.directory, here.gateway.federation.links, publisher, unix_time=unix_time
    )
    by_id = {caller.key_id: secret for secret, caller in callers.items()}
    backend = Backend(
        answer=partial(answer, here.gateway),
        models=lambda: list(here.gateway.directory.served.values()),
        authenticate=callers.get,
        ready=lambda: Readiness(True, ""),
        version="0",
        clock=here.gateway.clock,
        unix_time=unix_time,
    )
    context = AdminContext(
        directory=here.gateway.directory,
        publisher=publisher,
        order_service=order_service,
        reads=reads,
        still_valid=lambda key_id: callers.get(by_id.get(key_id, "")),
        session_key=b"k" * 32,
    )
    transport = httpx2.ASGITransport(create_http(backend, admin_routes(backend, context)))
    await order_service.start()
    await publisher.start()
    async with httpx2.AsyncClient(transport=transport, base_url="http://gateway") as http:
        try:
            yield Replica(here, publisher, order_service, book, http, callers, exchange, recorder, shift)
        finally:
            publisher.close()
            await order_service.close()
            await asyncio.gather(*publisher.saving)
            await recorder.close()
            await engine.dispose()


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("database") / "mico.db"
    upgrade(f"sqlite:///{path}")
    return path.read_bytes()


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks at the database and snapshots, of which there is one a second; each look has its time."""
    monkeypatch.setattr("gateway.admin.order_service.REFRESH_S", 0.05)
    monkeypatch.setattr("gateway.admin.order_service.REFRESH_TIMEOUT_S", DEADLINE_S)
    monkeypatch.setattr("gateway.telemetry.publisher.SNAPSHOT_INTERVAL_S", 0.05)


@pytest.fixture
def url(template: bytes, tmp_path: Path) -> str:
    (tmp_path / "mico.db").write_bytes(template)
    return f"sqlite:///{tmp_path}/mico.db"


def play(url: str, scenario: Callable[[Replica], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(60), scene() as here, open_replica(here, url) as operator:
            await scenario(operator)

    asyncio.run(main())


async def text_of(here: Scene, **sampling: Any) -> str:
    pieces: list[AnswerEvent] = [piece async for piece in answer(here.gateway, here.query(**sampling))]
    return "".join(piece.text for piece in pieces if isinstance(piece, Delta))


def test_a_drained_site_gets_nothing_new_finishes_what_runs_and_is_resumed(url: str) -> None:
    async def scenario(o: Replica) -> None:
        site = await o.here.site("a")
        running = asyncio.create_task(text_of(o.here))
        assign = await site.assigned()
        o.publisher.tick()
        done = await o.act("a", "drain")
        assert done.json()["preview"]["refused_models"] == ["m"]
        assert await o.state("a") == "draining"
        with pytest.raises(NoSite, match="a: draining"):
            await text_of(o.here)
        await site.finish(assign, "done", 1)
        assert await running == "done"
        assert (await o.act("a", "resume")).status_code == 200
        again = asyncio.create_task(text_of(o.here))
        await site.finish(await site.assigned(), "again", 1)
        assert await again == "again"
        acts = [(entry.action, entry.before, entry.after) for entry in await o.book.entries(10)]
        assert acts == [
            ("resume", "service: drain", "service: default"),
            ("drain", "service: default", "service: drain"),
        ]

    play(url, scenario)


def test_a_pause_moves_what_still_runs_once_its_time_has_passed(url: str) -> None:
    async def scenario(o: Replica) -> None:
        slow = await o.here.site("a")
        running = asyncio.create_task(text_of(o.here))
        assign = await slow.assigned()
        await slow.step(assign, "Hel", 3)
        await until(lambda: any(s.opened for s in o.here.gateway.live_queries.values()), "the first token")
        other = await o.here.site("b")
        o.publisher.tick()
        assert (await o.act("a", "pause", within_s=60)).status_code == 200
        assert await o.state("a") == "paused"
        assert other.inbox.empty()
        o.pass_time(61)
        resumed = await other.assigned()
        assert list(resumed.resume.token_ids) == [ord(letter) for letter in "Hel"]
        assert (await slow.next()).cancel.attempt_id == assign.attempt_id
        await other.finish(resumed, "lo", 5)
        assert await running == "Hello"
        assert [attempt.ended for attempt in o.here.outcomes[0].attempts] == ["draining", "finished"]

    play(url, scenario)


def test_what_can_not_go_on_elsewhere_is_left_to_finish(url: str) -> None:
    async def scenario(o: Replica) -> None:
        site = await o.here.site("a")
        running = asyncio.create_task(text_of(o.here, n=2))
        assign = await site.assigned()
        await site.step(assign, "x", 1)
        await until(lambda: any(s.opened for s in o.here.gateway.live_queries.values()), "the first token")
        await o.here.site("b")
        o.publisher.tick()
        await o.act("a", "pause", within_s=0)
        await site.finish(assign, "y", 2)
        await site.finish(assign, "z", 1, index=1)
        assert sorted(await running) == ["x", "y", "z"]
        assert len(o.here.outcomes[0].attempts) == 1

    play(url, scenario)


def test_a_pause_moves_nothing_to_other_weights(url: str) -> None:
    async def scenario(o: Replica) -> None:
        site = await o.here.site("a")
        running = asyncio.create_task(text_of(o.here))
        assign = await site.assigned()
        await site.step(assign, "Hel", 3)
        await until(lambda: any(s.opened for s in o.here.gateway.live_queries.values()), "the first token")
        other = await o.here.site("b", revision="rev-2")
        o.publisher.tick()
        await o.act("a", "pause", within_s=0)
        await site.finish(assign, "lo", 5)
        assert (await running, other.inbox.empty()) == ("Hello", True)

    play(url, scenario)


def test_an_order_ends_by_itself_and_the_audit_says_so(url: str) -> None:
    async def scenario(o: Replica) -> None:
        await o.here.site("a")
        o.publisher.tick()
        await o.act("a", "weight", weight=0, for_s=600)
        assert o.here.gateway.directory.sites[0].weight == 0
        o.pass_time(601)
        await until(lambda: o.here.gateway.directory.sites[0].weight == 1.0, "the weight is back")
        await until(lambda: o.order_service.orders == [], "the order is removed")
        assert [entry.action for entry in await o.book.entries(10)] == ["expired", "weight 0"]

    play(url, scenario)


def test_an_order_holds_at_every_replica_and_after_a_restart(url: str) -> None:
    async def main() -> None:
        async with asyncio.timeout(60), scene() as first, scene() as second:
            for here in (first, second):
                await here.site("a")
            async with open_replica(first, url) as one, open_replica(second, url) as two:
                one.publisher.tick()
                assert (await one.act("a", "pin-off", model="m")).status_code == 200
                await until(lambda: "m" in second.gateway.directory.sites[0].pinned_off, "the other replica")
                await until(
                    lambda: any(e.kind == "operator" for e in two.publisher.events.newest()),
                    "its event there",
                )
            async with open_replica(second, url) as reborn:
                assert second.gateway.directory.sites[0].pinned_off == {"m"}
                assert [e.who for e in reborn.publisher.events.newest() if e.kind == "operator"] == ["key-a"]

    asyncio.run(main())


def test_a_page_shows_the_queries_of_every_replica(url: str) -> None:
    async def main() -> None:
        async with asyncio.timeout(60), scene() as first, scene() as second:
            site = await first.site("a")
            await second.site("a")
            async with open_replica(first, url) as one, open_replica(second, url, "g2") as two:
                running = asyncio.create_task(text_of(first))
                await site.finish(await site.assigned(), "hello", 5)
                await running
                one.publisher.observe(first.outcomes[0])
                await one.exchange.exchange()
                await two.exchange.exchange()
                one.publisher.tick()
                shown = two.publisher.tick()
                assert shown.replicas == ["g1", "g2"]
                assert shown.totals.ended_per_min == 1.0
                assert [(r.site, r.attempts) for r in shown.routes] == [("a", 1)]
                assert shown.sites[0].ttft_p95_s is not None
                await one.exchange.exchange()
                assert one.publisher.tick().totals.ended_per_min == 1.0

    asyncio.run(main())


@pytest.mark.parametrize(
    ("site", "verb", "body", "param"),
    [
        ("a", "drain", {"reason": ""}, "reason"),
        ("nowhere", "drain", {}, "site"),
        ("a", "explode", {}, "verb"),
        ("a", "weight", {"weight": 101}, "weight"),
        ("a", "weight", {}, "weight"),
        ("a", "drain", {"for_s": -1}, "for_s"),
        ("a", "pin-off", {"model": "gpt-9"}, "model"),
        ("a", "drain", {"colour": "red"}, None),
    ],
)
def test_an_act_that_makes_no_sense_is_refused(
    url: str, site: str, verb: str, body: dict[str, Any], param: str | None
) -> None:
    async def scenario(o: Replica) -> None:
        await o.here.site("a")
        o.publisher.tick()
        refused = await o.act(site, verb, **body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
        assert await o.book.entries(5) == []

    play(url, scenario)


async def story(o: Replica, site: str, limit: int = 100) -> list[tuple[str, str]]:
    """Who saw or did what, oldest first."""
    path = f"/admin/api/sites/{site}/events?limit={limit}"
    events = (await o.http.get(path, headers=BEARER)).raise_for_status().json()["events"]
    return [(event["who"] or event["replica"], event["text"]) for event in reversed(events)]


def test_when_and_why_a_site_left_is_told_by_every_replica_and_after_a_restart(url: str) -> None:
    told = [("g1", text) for text in ("joined", "is down: the connection ended", "joined again")]
    told.append(("key-a", "drain: a test"))
    texts = [text for _, text in told]

    async def main() -> None:
        async with asyncio.timeout(60), scene() as there:
            async with scene() as here, open_replica(here, url) as o, open_replica(there, url, "g2") as other:
                site = await here.site("a")
                o.publisher.tick()
                await site.close()
                await until(lambda: here.gateway.directory.down_reasons, "the site has left")
                o.publisher.tick()
                await site.join()
                o.publisher.tick()
                await o.act("a", "drain")
                await until(lambda: o.recorder.pending == 0, "all events stored")
                for replica in (o, other):
                    assert [each for each in await story(replica, "a") if each in told] == told
                    assert await story(replica, "a", 1) == (await story(replica, "a"))[-1:]
                    assert await story(replica, "b") == []
            async with open_replica(there, url) as again:
                assert [each for each in await story(again, "a") if each in told] == told
                shown = [event.text for event in reversed(again.publisher.events.newest())]
                assert [text for text in shown if text in texts] == texts

    asyncio.run(main())


@pytest.mark.parametrize("limit", ["0", "1001", "x", "-1", "\u0661"])
def test_a_limit_that_makes_no_sense_is_refused(url: str, limit: str) -> None:
    async def scenario(o: Replica) -> None:
        refused = await o.http.get("/admin/api/sites/a/events", params={"limit": limit}, headers=BEARER)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "limit")

    play(url, scenario)


def test_nobody_sees_or_acts_without_an_admin_key(url: str) -> None:
    async def scenario(o: Replica) -> None:
        await o.here.site("a")
        for path in (
            "/admin/api/sites",
            "/admin/api/overview",
            "/admin/api/history",
            "/admin/api/events",
            "/admin/api/sites/a/events",
            "/admin/api/decisions/x",
            "/admin/stream",
        ):
            assert (await o.http.get(path)).status_code == 401, path
            user = await o.http.get(path, headers={"authorization": f"Bearer {USER}"})
            assert user.status_code == 403, path
        refused = await o.http.post("/admin/api/sites/a/drain", json={"reason": "x"})
        assert refused.status_code == 401
        assert (await o.http.get("/admin/api/session")).json() == {"who": "", "may_act": False}

    play(url, scenario)


async def sign_in(o: Replica, **more: Any) -> httpx2.Response:
    return await o.http.post("/admin/api/session", json={"key": ADMIN, **more})


def test_a_session_is_a_cookie_that_acts_only_from_our_own_page(url: str) -> None:
    async def scenario(o: Replica) -> None:
        await o.here.site("a")
        o.publisher.tick()
        cookie = (await sign_in(o)).headers["set-cookie"]
        for word in ("HttpOnly", "SameSite=strict", "Path=/admin", f"Max-Age={SESSION_S}"):
            assert word.lower() in cookie.lower()
        assert ADMIN not in cookie
        assert (await o.http.get("/admin/api/overview")).json()["replica"] == "g1"
        path, body = "/admin/api/sites/a/drain", {"reason": "a test"}
        for foreign in (
            {"origin": "https://evil.example"},
            {"sec-fetch-site": "cross-site"},
            {"sec-fetch-site": "same-site"},
        ):
            assert (await o.http.post(path, json=body, headers=foreign)).status_code == 403
        form = await o.http.post(
            path, content=b"reason=x", headers={"content-type": "application/x-www-form-urlencoded"}
        )
        assert form.status_code == 403
        own = {"origin": "http://gateway", "sec-fetch-site": "same-origin"}
        assert (await o.http.post(path, json=body, headers=own)).status_code == 200

    play(url, scenario)


@pytest.mark.parametrize("name", ["aws/us-east-1", "a//b", "events", "ü ?#%2F"])
def test_a_site_is_drained_and_told_of_whatever_its_name(url: str, name: str) -> None:
    async def scenario(o: Replica) -> None:
        await o.here.site(name)
        o.publisher.tick()
        quoted = quote(name, safe="")
        assert (await o.act(quoted, "drain")).status_code == 200
        assert await o.state(name) == "draining"
        assert ("key-a", "drain: a test") in await story(o, quoted)
        error_of(await o.http.get(f"/admin/api/sites/{quoted}/drain", headers=BEARER), 404)
        error_of(await o.http.get(f"/admin/api/sites/{quoted}", headers=BEARER), 404)

    play(url, scenario)


@pytest.mark.parametrize("request_id", ["team/7", "https://x/y", "100%", "a?b#c"])
def test_a_query_is_explained_whatever_its_client_called_it(url: str, request_id: str) -> None:
    async def scenario(o: Replica) -> None:
        o.recorder.record(outcome(request_id=request_id))
        assert await o.recorder.flush()
        path = f"/admin/api/decisions/{quote(request_id, safe='')}"
        (found,) = (await o.http.get(path, headers=BEARER)).raise_for_status().json()["queries"]
        assert found["usage"]["request_id"] == request_id

    play(url, scenario)


@pytest.mark.parametrize(
    ("said", "secure"),
    [(None, False), ("http", False), ("https", True), ("HTTPS", True), ("https, http", True)],
)
def test_a_cookie_stays_on_tls_however_many_proxies_there_are(
    url: str, said: str | None, secure: bool
) -> None:
    async def scenario(o: Replica) -> None:
        headers = {"x-forwarded-proto": said} if said else {}
        answer = await o.http.post("/admin/api/session", json={"key": ADMIN}, headers=headers)
        assert ("secure" in answer.headers["set-cookie"].lower()) is secure

    play(url, scenario)


@pytest.mark.parametrize(
    "body", [b'{"key":"\xff"}', b'{"\xff":1}', b"\xff", b"", b"[]", b'{"key":1}', b'{"key":' + b"[" * 9999]
)
def test_a_body_that_is_no_json_of_ours_is_the_clients_mistake(url: str, body: bytes) -> None:
    async def scenario(operator: Replica) -> None:
        kind = {"content-type": "application/json"}
        for path, headers in (("session", {}), ("sites/a/drain", BEARER)):
            answer = await operator.http.post(f"/admin/api/{path}", content=body, headers={**kind, **headers})
            assert error_of(answer, 400)["type"] == "invalid_request_error"

    play(url, scenario)


def test_a_session_ends_with_its_time_its_key_or_its_signature(url: str) -> None:
    async def scenario(o: Replica) -> None:
        await sign_in(o)
        whole = o.http.cookies[COOKIE]
        claim, _, signature = whole.partition(".")
        forged = (bytes.fromhex(claim).replace(b"key-a", b"key-u")).hex()
        for cookie in (f"{forged}.{signature}", f"{claim}.{signature[:-1]}", claim, "zz.zz", ""):
            o.http.cookies.set(COOKIE, cookie)
            assert (await o.http.get("/admin/api/overview")).status_code == 401
            o.http.cookies.clear()
        await sign_in(o)
        o.pass_time(SESSION_S + 1)
        assert (await o.http.get("/admin/api/overview")).status_code == 401
        await sign_in(o)
        assert (await o.http.get("/admin/api/overview")).status_code == 200
        del o.callers[ADMIN]
        assert (await o.http.get("/admin/api/overview")).status_code == 401

    play(url, scenario)


def test_a_session_may_be_for_looking_only(url: str) -> None:
    async def scenario(o: Replica) -> None:
        await o.here.site("a")
        assert (await sign_in(o, view_only=True)).json() == {"may_act": False}
        assert (await o.http.get("/admin/api/sites")).status_code == 200
        refused = await o.http.post("/admin/api/sites/a/drain", json={"reason": "x"})
        assert (refused.status_code, "only look" in refused.text) == (403, True)

    play(url, scenario)


def test_a_listener_gets_the_newest_skips_what_it_missed_and_ends_with_the_publisher(url: str) -> None:
    async def scenario(o: Replica) -> None:
        first = await o.publisher.after(0)
        assert first is not None
        waiting = asyncio.create_task(o.publisher.after(first.seq + 2))
        for _ in range(3):
            o.publisher.tick()
        newest = await waiting
        assert newest is not None
        assert newest.seq == first.seq + 3
        assert json.loads(o.publisher.encoded)["seq"] == newest.seq
        missed = json.loads(columns_after(o.publisher, first.seq + 1))
        assert (missed["resumed"], len(missed["columns"]["at"])) == (True, 2)
        boot_id = o.publisher.boot_id
        assert last_seen_seq(o.publisher, f"{boot_id}-{first.seq}") == first.seq
        for unheard_of in (f"{boot_id}-²", f"{boot_id}-{'9' * 5000}", f"{boot_id}-{newest.seq + 9}", boot_id):
            assert last_seen_seq(o.publisher, unheard_of) == 0, "it would wait for what may never come"
        everything = json.loads(columns_after(o.publisher, last_seen_seq(o.publisher, "other-9")))
        assert (everything["resumed"], len(everything["columns"]["at"])) == (False, newest.seq)
        last = asyncio.create_task(o.publisher.after(newest.seq))
        o.publisher.close()
        assert await last is None

    play(url, scenario)


def test_the_stream_opens_with_history_then_snapshots_with_ids_and_ends(url: str) -> None:
    async def scenario(o: Replica) -> None:
        await o.here.site("a")
        o.publisher.tick()
        after, listened = o.publisher.after, list[int]()

        def listen(seq: int) -> Awaitable[Snapshot | None]:
            listened.append(seq)
            return after(seq)

        o.publisher.after = listen  # type: ignore[method-assign, assignment]
        reading = asyncio.create_task(o.http.get("/admin/stream", headers=BEARER))
        await until(lambda: len(listened) > 1, "a snapshot was sent, and the next is waited for")
        o.publisher.close()
        answered = await reading
        assert answered.headers["content-type"].startswith("text/event-stream")
        assert "content-encoding" not in answered.headers
        blocks = answered.text.split("\n\n")
        assert blocks[0].startswith("retry: 2000\nevent: history\ndata: ")
        ids = [block.splitlines()[0] for block in blocks[1:] if block]
        assert ids
        assert all(line.startswith(f"id: {o.publisher.boot_id}-") for line in ids)
        assert sse_event("x", b"{}") == b"event: x\ndata: {}\n\n"

    play(url, scenario)


def test_the_snapshot_shows_load_where_it_is_and_minutes_outlive_the_process(url: str) -> None:
    async def scenario(o: Replica) -> None:
        site = await o.here.site("a", seconds_per_token=0.1)
        await site.report(token_load=200.0, running=2, tokens_per_s=40.0)
        await until(lambda: o.here.gateway.directory.sites[0].load.running == 2, "the report")
        shown = o.publisher.tick().sites[0]
        assert (shown.capacity_tokens, shown.load, shown.running) == (400, 0.5, 2)
        o.pass_time(60)
        o.publisher.tick()
        history_store = SnapshotTable(open_engine(url))
        await asyncio.gather(*o.publisher.saving)
        assert {"a": 0.5} in [
            minute["load"] for _, minute in await history_store.since(0)
        ]  # or one just before
        async with open_replica(o.here, url) as reborn:
            answered = await reborn.http.get("/admin/api/history?minutes=1440", headers=BEARER)
            assert 0.5 in answered.json()["load"]["a"]
            wrong = await reborn.http.get("/admin/api/history?minutes=7", headers=BEARER)
            assert wrong.json()["error"]["param"] == "minutes"
        await history_store._engine.dispose()

    play(url, scenario)


def test_the_page_and_its_files_are_served_under_a_strict_policy(url: str) -> None:
    async def scenario(o: Replica) -> None:
        page = await o.http.get("/admin")
        assert page.status_code == 200
        assert "default-src 'none'" in page.headers["content-security-policy"]
        script = await o.http.get("/admin/static/page.js")
        assert script.headers["content-type"] == "text/javascript; charset=utf-8"
        unchanged = await o.http.get(
            "/admin/static/page.js", headers={"if-none-match": script.headers["etag"]}
        )
        assert (unchanged.status_code, unchanged.content) == (304, b"")
        for name in ("nope.js", "..%2fpages.py", "__init__.py"):
            assert (await o.http.get(f"/admin/static/{name}")).status_code == 404

    play(url, scenario)
