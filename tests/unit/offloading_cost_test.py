"""A bid costs what has changed since the last one, not what there is: a thousand idle sites bid often."""

from __future__ import annotations

from dataclasses import dataclass, field

from gateway.domain import Credit, LoadReport, SiteIdentity
from gateway.federation.attempt import LiveAttempt
from gateway.federation.directory import Directory
from gateway.federation.offloading import Offloading

SITES = 200


@dataclass
class Donor:
    """A link without attempts that counts how often it is looked at."""

    looked: int = 0
    released: list[list[str]] = field(default_factory=list)

    def pending(self) -> list[LiveAttempt]:
        self.looked += 1
        return []

    def release(self, release_id: str, attempt_ids: list[str]) -> None:
        self.released.append(attempt_ids)


def test_a_bid_looks_only_at_the_sites_that_changed() -> None:
    directory = Directory()
    donors = {f"s{number}": Donor() for number in range(SITES)}
    offloading = Offloading(donors, directory, lambda: 0.0)
    for name in donors:
        directory.join(SiteIdentity(name, "b", "c", "r", {}, slots=1, kv_capacity_tokens=100), 0.0)
        directory.report(name, LoadReport(seq=1, received_s=0.0, running=1, pending=1), Credit())
        offloading.mark_changed(name)
    directory.report("s0", LoadReport(seq=2, received_s=0.0, kv_free_tokens=100), Credit())
    offloading.bid("s0")
    assert sum(each.looked for each in donors.values()) == SITES
    for _ in range(10):
        offloading.mark_changed("s0")
        offloading.bid("s0")
    assert sum(each.looked for each in donors.values()) == SITES + 10
