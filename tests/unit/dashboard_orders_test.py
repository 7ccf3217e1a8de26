"""Operators' orders hold a site back, outlive its restart, and end by themselves."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.admin import order_service
from gateway.admin.order_service import event_of
from gateway.domain import Credit, LoadReport, SiteIdentity, SiteState
from gateway.federation.directory import Directory
from gateway.operator_orders import Action, AuditEntry, Order, Standing, Verb, order_of, standings
from gateway.store.orders import OrderTable
from gateway.telemetry.publisher import SnapshotPublisher
from tests.support.fakes.federation import until

A = SiteIdentity("a", "boot", "aws", "r", {}, slots=4, kv_capacity_tokens=100)


def directory() -> Directory:
    here = Directory()
    here.join(A, 0.0)
    here.report("a", LoadReport(seq=1, received_s=0.0), Credit())
    return here


def only(here: Directory) -> tuple[SiteState, float, frozenset[str]]:
    (site,) = here.sites
    return site.state, site.weight, site.pinned_off


def test_an_order_outlives_the_site_that_left_and_joined_again() -> None:
    here = directory()
    here.apply_standings({"a": Standing(SiteState.DRAINING, 0.5, frozenset({"m"}))})
    assert only(here) == (SiteState.DRAINING, 0.5, {"m"})
    here.leave("a")
    assert only(here)[0] is SiteState.DOWN
    here.join(replace(A, boot_id="next"), 5.0)
    assert only(here)[0] is SiteState.STALE
    here.report("a", LoadReport(seq=1, received_s=5.0), Credit())
    assert only(here) == (SiteState.DRAINING, 0.5, {"m"})
    here.apply_standings({})
    assert only(here) == (SiteState.READY, 1.0, frozenset())


def test_lifting_an_order_does_not_wake_a_site_that_drains_by_itself() -> None:
    here = directory()
    here.apply_standings({"a": Standing(SiteState.PAUSED)})
    here.set_state("a", SiteState.DRAINING)
    here.apply_standings({})
    assert only(here)[0] is SiteState.DRAINING


@pytest.mark.parametrize(
    ("action", "standing"),
    [
        (Action(Verb.DRAIN, "a", "why"), Standing(SiteState.DRAINING)),
        (Action(Verb.PAUSE, "a", "why"), Standing(SiteState.PAUSED)),
        (Action(Verb.WEIGHT, "a", "why", weight=25), Standing(weight=0.25)),
        (Action(Verb.PIN_OFF, "a", "why", model="m"), Standing(pinned_off=frozenset({"m"}))),
    ],
)
def test_what_a_verb_makes_of_a_site(action: Action, standing: Standing) -> None:
    order = order_of(action, "ann", 100.0)
    assert order is not None
    assert standings([order], 100.0) == {"a": standing}


@pytest.mark.parametrize("verb", [Verb.RESUME, Verb.UNPIN])
def test_what_only_lifts_leaves_no_order(verb: Verb) -> None:
    assert order_of(Action(verb, "a", "why", model="m"), "ann", 0.0) is None
    assert order_of(Action(Verb.WEIGHT, "a", "why", weight=100), "ann", 0.0) is None


class SilentOrders(OrderTable):
    """An order table that answers once and then hangs."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.looks = 0

    async def orders(self) -> list[Order]:
        self.looks += 1
        if self.looks > 1:
            await asyncio.Event().wait()
        return [self.order]

    async def entries(self, limit: int, since: float = 0.0) -> list[AuditEntry]:
        return []

    async def expire(self, order: Order, now: float) -> None:
        await asyncio.Event().wait()


def test_an_order_ends_on_time_though_the_database_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order_service, "REFRESH_S", 0.01)
    monkeypatch.setattr(order_service, "REFRESH_TIMEOUT_S", 0.01)
    now = [0.0]

    async def main() -> None:
        here = directory()
        book = SilentOrders(Order("a", "weight", "50", "ann", "why", given_at=0.0, until_at=100.0))
        keeping = order_service.OrderService(
            book, here, {}, SnapshotPublisher(here, "g1"), unix_time=lambda: now[0]
        )
        await keeping.start()
        try:
            assert only(here)[1] == 0.5
            now[0] = 100.0
            await until(lambda: only(here)[1] == 1.0, "the order has ended")
            looks = book.looks
            await until(lambda: book.looks > looks, "it is asked again")
        finally:
            await keeping.close()

    asyncio.run(main())


class LateOrders(SilentOrders):
    """An order table whose second answer is delayed until the test releases it."""

    def __init__(self) -> None:
        self.found: list[Order] = []
        self.looks = 0
        self.go = asyncio.Event()

    async def orders(self) -> list[Order]:
        self.looks += 1
        found = list(self.found)
        if self.looks == 2:
            await self.go.wait()
        return found

    async def change(self, site: str, subject: str, order: Order | None, **act: object) -> AuditEntry:
        self.found = [order] if order is not None else []
        return AuditEntry("1", 0.0, "ann", site, "", "", "", "", None)


def test_a_refresh_that_ends_late_does_not_undo_what_was_ordered_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(order_service, "REFRESH_S", 0.0)

    async def main() -> None:
        here, book = directory(), LateOrders()
        keeping = order_service.OrderService(
            book, here, {}, publisher := SnapshotPublisher(here, "g1"), unix_time=lambda: 0.0
        )
        publisher.tick()
        await keeping.start()
        try:
            await until(lambda: book.looks == 2, "a look has begun")
            monkeypatch.setattr(order_service, "REFRESH_S", 3600.0)  # no later one puts it right
            acting = asyncio.create_task(keeping.act(Action(Verb.WEIGHT, "a", "why", weight=50), "ann"))
            await until(lambda: book.found, "it is written down")
            book.go.set()
            await acting
            for _ in range(9):
                await asyncio.sleep(0)  # the late look may end now
            assert only(here)[1] == 0.5
        finally:
            await keeping.close()

    asyncio.run(main())


orders = st.builds(
    Order,
    site=st.sampled_from("ab"),
    subject=st.sampled_from(["service", "weight", "model m", "model n"]),
    value=st.just("50"),
    who=st.just("ann"),
    reason=st.just("why"),
    given_at=st.just(0.0),
    until_at=st.none() | st.floats(0, 100),
)


@given(st.lists(orders), st.floats(0, 200))
def test_an_order_counts_exactly_while_it_stands(given_orders: list[Order], now: float) -> None:
    standing = [order for order in given_orders if order.until_at is None or now < order.until_at]
    assert standings(given_orders, now) == standings(standing, now)
    assert set(standings(given_orders, now)) == {order.site for order in standing}


@pytest.mark.parametrize(
    ("reason", "until_at", "text"),
    [
        ("a new disk", None, "drain: a new disk"),
        ("a new disk", 130.0, "drain (for 2 min): a new disk"),
        ("", 40.0, "drain (for 30 s)"),
        ("", None, "drain"),
    ],
)
def test_an_act_is_told_with_its_reason_if_it_has_one(reason: str, until_at: float | None, text: str) -> None:
    entry = AuditEntry("1", 10.0, "ada", "a", "drain", reason, "", "", until_at)
    assert event_of(entry).text == text
