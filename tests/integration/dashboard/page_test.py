"""Data of the admin page: snapshots, the stream, histories of sites, explained queries, and its files."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable
from urllib.parse import quote

import pytest

from gateway.admin.stream import columns_after, last_seen_seq, sse_event
from gateway.store.database import open_engine
from gateway.store.snapshots import SnapshotTable
from gateway.telemetry.snapshot import Snapshot
from tests.support.admin_replica import (
    BEARER,
    Replica,
    open_replica,
    play,
    site_events,
    text_of,
)
from tests.support.fakes.federation import scene, until
from tests.support.fakes.store import outcome


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

                def is_shown() -> bool:
                    o.publisher.tick()
                    return "joined again" in [event.text for event in o.publisher.events.newest()]

                await until(is_shown, "the site is back")
                await o.act("a", "drain")
                await until(lambda: o.recorder.pending == 0, "all events stored")
                for replica in (o, other):
                    assert [each for each in await site_events(replica, "a") if each in told] == told
                    assert await site_events(replica, "a", 1) == (await site_events(replica, "a"))[-1:]
                    assert await site_events(replica, "b") == []
            async with open_replica(there, url) as again:
                assert [each for each in await site_events(again, "a") if each in told] == told
                shown = [event.text for event in reversed(again.publisher.events.newest())]
                assert [text for text in shown if text in texts] == texts

    asyncio.run(main())


@pytest.mark.parametrize("limit", ["0", "1001", "x", "-1", "\u0661"])
def test_a_limit_that_makes_no_sense_is_refused(url: str, limit: str) -> None:
    async def scenario(o: Replica) -> None:
        refused = await o.http.get("/admin/api/sites/a/events", params={"limit": limit}, headers=BEARER)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "limit")

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
