"""A bid costs what has changed since the last one, and what can still move: a thousand sites bid often."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

from gateway.domain import Credit, IterationCost, LoadReport, Model, SiteIdentity
from gateway.federation.directory import Directory
from gateway.federation.offloading import AGAIN_S, FEW, ROUND_TIMEOUT_S, Offloading
from gateway.routing.demand import Demand

SITES = 200
DEMAND = Demand("m", 10, 5.0, 100)
MODEL = Model("m", "r", 1024, 0, "o", frozenset())


class Waiting(NamedTuple):
    """What a bid reads of an attempt."""

    id: str
    demand: Demand
    moves: int = 0
    excluded: frozenset[str] = frozenset()


@dataclass
class Donor:
    """A link that counts how often it is looked at."""

    looked: int = 0
    waiting: list[Waiting] = field(default_factory=list)
    released: list[list[str]] = field(default_factory=list)

    def pending(self) -> list[Waiting]:
        self.looked += 1
        return self.waiting

    def release(self, release_id: str, attempt_ids: list[str]) -> None:
        self.released.append(attempt_ids)


def test_a_bid_looks_only_at_the_sites_that_changed() -> None:
    directory = Directory()
    donors = {f"s{number}": Donor() for number in range(SITES)}
    offloading = Offloading(donors, directory, lambda: 0.0)
    for name in donors:
        directory.join(SiteIdentity(name, "b", "c", "r", {"m": MODEL}, slots=1, kv_capacity_tokens=100), 0.0)
        directory.report(name, LoadReport(seq=1, received_s=0.0, running=1, pending=1), Credit())
        offloading.mark_changed(name)
    directory.report("s0", LoadReport(seq=2, received_s=0.0, kv_free_tokens=100), Credit())
    offloading.bid("s0")
    assert sum(each.looked for each in donors.values()) == SITES
    for _ in range(10):
        offloading.mark_changed("s0")
        offloading.bid("s0")
    assert sum(each.looked for each in donors.values()) == SITES + 10


def test_a_backlog_is_looked_at_for_none_without_its_model_and_not_all_the_time() -> None:
    now_s, directory = 0.0, Directory()
    for name, model in (("busy", MODEL), ("idle", MODEL), ("other", replace(MODEL, id="x"))):
        identity = SiteIdentity(name, "b", "c", "r", {model.id: model}, slots=1, kv_capacity_tokens=10_000)
        directory.join(identity, 0.0)
        load = LoadReport(seq=1, received_s=0.0, kv_free_tokens=9_000, iteration=IterationCost(0.02))
        directory.report(name, replace(load, running=int(name == "busy")), Credit())
    busy = Donor(waiting=[Waiting(str(number), DEMAND) for number in range(FEW)])
    offloading = Offloading({"busy": busy}, directory, lambda: now_s)

    def looked(bidder: str) -> int:
        before = busy.looked
        offloading.mark_changed("busy")
        offloading.bid(bidder)
        return busy.looked - before

    assert [looked("other"), looked("other")] == [1, 1]
    busy.waiting = [Waiting(str(number), DEMAND) for number in range(10 * FEW)]
    assert [looked("other"), looked("other")] == [1, 0]
    assert looked("idle") == 0
    now_s = 10 * FEW * AGAIN_S
    assert looked("other") == 0
    assert looked("idle") > 0


def test_what_a_site_is_asked_to_release_is_offered_to_no_other_until_the_round_ends() -> None:
    now_s = 0.0
    directory = Directory()
    for name in ("idle", "other", "busy"):
        identity = SiteIdentity(name, "b", "c", "r", {"m": MODEL}, slots=1, kv_capacity_tokens=10_000)
        directory.join(identity, 0.0)
        load = LoadReport(seq=1, received_s=0.0, kv_free_tokens=9_000, iteration=IterationCost(0.02))
        if name == "busy":
            load = replace(load, running=1, pending=1, running_remaining=(500,), running_weight=1)
        directory.report(name, load, Credit())
    busy = Donor(waiting=[Waiting("first", DEMAND)])
    offloading = Offloading({"busy": busy}, directory, lambda: now_s)

    def offered_after_a_bid(bidder: str) -> int:
        offloading.bid(bidder)
        return len(offloading.offers())

    offloading.mark_changed("busy")
    assert len(offloading.offers()) == 1
    assert offered_after_a_bid("idle") == 0
    assert offered_after_a_bid("other") == 0
    assert busy.released == [["first"]]
    busy.waiting.append(Waiting("second", DEMAND))
    offloading.mark_changed("busy")
    assert len(offloading.offers()) == 1
    assert offered_after_a_bid("other") == 0
    assert busy.released == [["first"], ["second"]]
    now_s = ROUND_TIMEOUT_S
    assert len(offloading.offers()) == 1


def test_a_crowded_site_where_no_query_of_the_gateway_waits_long_offers_nothing() -> None:
    """What waits there is another gateway's: its own query starts first."""
    directory, queue = Directory(), Donor(waiting=[Waiting("first", DEMAND)])
    model = Model("m", "r", 1024, 0, "o", frozenset())
    directory.join(SiteIdentity("s", "b", "c", "r", {"m": model}, slots=4, kv_capacity_tokens=10_000), 0.0)
    load = LoadReport(seq=1, received_s=0.0, running=3, pending=9, kv_free_tokens=9_000)
    directory.report("s", load, Credit())
    offloading = Offloading({"s": queue}, directory, lambda: 0.0)
    offloading.mark_changed("s")
    assert directory.crowded("s")
    assert not offloading.offers()
