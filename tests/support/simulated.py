"""Arbitrary queries and sites, and runs of the simulated federation."""

from __future__ import annotations

from hypothesis import strategies as st

from gateway.routing.policies import POLICIES
from mico.simulation.estimators import ESTIMATORS, expectations, noisy
from mico.simulation.federation import Federation, Setting
from mico.simulation.metrics import ORDERS
from mico.simulation.queries import Query, Record
from mico.simulation.specification import SiteSpec

LEARNERS = {name: each for name, each in ESTIMATORS.items() if name != "shipped"} | {"noisy": noisy(0.7)}

sizes = st.tuples(st.floats(0, 20), st.integers(1, 3000), st.integers(1, 400))
workloads = st.lists(sizes, min_size=1, max_size=40).map(
    lambda rows: [Query(i, at, prompt, answer) for i, (at, prompt, answer) in enumerate(sorted(rows))]
)
specs = st.builds(
    SiteSpec.of,
    name=st.just(""),
    slots=st.integers(1, 6),
    slowdown=st.floats(0.3, 4),
    rtt_s=st.floats(0, 0.3),
    kv_tokens=st.integers(3500, 12_000),
)
federations = st.lists(specs, min_size=1, max_size=4).map(
    lambda found: tuple(
        SiteSpec(f"s{i}", each.slots, each.cost, each.rtt_s, each.kv_tokens) for i, each in enumerate(found)
    )
)


def simulate(
    queries: list[Query],
    sites: tuple[SiteSpec, ...],
    *,
    policy: str = "mico",
    order: str = "work",
    estimator: str = "oracle",
    **more: object,
) -> tuple[list[Record], Federation]:
    score, starving_after_s = ORDERS[order]
    setting = Setting(sites, POLICIES[policy], score, starving_after_s, **more)  # type: ignore[arg-type]
    federation = Federation(setting, expectations(queries, LEARNERS[estimator](queries)))
    return federation.run(queries), federation
