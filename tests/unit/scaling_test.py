"""Sizes of pools: within bounds and budget, stable under bursts, applied to the clouds' groups."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.domain import IterationCost, LoadReport, Site, SiteIdentity, SiteState
from gateway.scaling.groups import AwsGroup, AzureGroup, GcpGroup, GroupFailed
from gateway.scaling.plan import ScalingPlan, read_plan
from gateway.scaling.scaler import Scaler
from gateway.scaling.sizing import (
    Bounds,
    Stabilizer,
    busy_machines,
    by_pool,
    desired_machines,
    needed_machines,
)
from gateway.telemetry.snapshot import Pool

COST = IterationCost(base_s=0.01)


def site(name: str, running: int, pending_tokens: float = 0.0, pool: str = "eu") -> Site:
    identity = SiteIdentity(name, "boot", "aws", "eu", {}, slots=10, kv_capacity_tokens=1000, pool=pool)
    load = LoadReport(1, 0.0, running=running, iteration=COST, pending_response_tokens=pending_tokens)
    return Site(identity, SiteState.READY, load)


def test_a_pools_work_is_its_slots_in_use_and_what_waits() -> None:
    assert busy_machines([site("a", 10), site("b", 5)]) == pytest.approx(1.5)
    # 10 rows in 10 ms are 1,000 tokens a second, so 10,000 waiting tokens are a machine's work of 10 s
    assert busy_machines([site("a", 10, pending_tokens=10_000.0)]) == pytest.approx(2.0)


def test_a_site_of_next_to_no_speed_needs_no_more_than_its_pool_may_have() -> None:
    slow = replace(
        site("a", 10, pending_tokens=10_000.0).load, iteration=IterationCost(), tokens_per_s=5e-324
    )
    busy = {"eu": busy_machines([replace(site("a", 10), load=slow)])}
    assert desired_machines(busy, {"eu": Bounds(1, 6)}) == {"eu": 6}


def test_sites_of_one_pool_count_together_and_one_without_a_pool_alone() -> None:
    pools = by_pool([site("a", 1), site("b", 1), site("c", 1, pool="")])
    assert {name: len(sites) for name, sites in pools.items()} == {"eu": 2, "c": 1}


def test_what_a_full_pool_cannot_take_goes_to_the_cheapest_with_room() -> None:
    bounds = {"near": Bounds(1, 2, 3.0), "cheap": Bounds(0, 5, 1.0), "dear": Bounds(0, 5, 9.0)}
    assert desired_machines({"near": 3.5}, bounds) == {"near": 2, "cheap": 3, "dear": 0}


def test_a_budget_pays_for_every_machine_that_it_was_made_for() -> None:
    assert desired_machines({"eu": 9.0}, {"eu": Bounds(0, 9, 0.9)}, 6.3) == {"eu": 7}
    assert desired_machines({"eu": 9.0}, {"eu": Bounds(1, 9, 0.1)}, 0.3) == {"eu": 3}


limits = st.tuples(st.integers(0, 3), st.integers(0, 9), st.floats(0, 10)).map(
    lambda t: Bounds(t[0], t[0] + t[1], t[2])
)


@given(
    st.dictionaries(st.sampled_from("abcd"), limits),
    st.dictionaries(st.sampled_from("abcdef"), st.floats(0, 40)),
    st.floats(0, 100),
)
def test_bounds_always_hold_and_the_budget_beyond_the_fewest(
    bounds: dict[str, Bounds], busy: dict[str, float], budget: float
) -> None:
    machines = desired_machines(busy, bounds, budget)
    assert machines.keys() == bounds.keys() | busy.keys()
    assert all(bounds[name].fewest <= machines[name] <= bounds[name].most for name in bounds)
    least = sum(limit.fewest * limit.usd_per_hour for limit in bounds.values())
    assert sum(machines[n] * bounds[n].usd_per_hour for n in bounds) <= max(budget, least) + 1e-6


def test_more_must_be_wanted_on_end_and_less_for_longer() -> None:
    stabilizer, size, sizes = Stabilizer(up_after_s=30, down_after_s=600), 2, []
    for now in range(0, 1000, 10):
        stabilizer.observe(float(now), 5 if 100 <= now < 140 else 2)
        size = stabilizer.size(size)
        sizes.append((now, size))
    rises = [now for (_, before), (now, after) in pairwise(sizes) if after > before]
    falls = [now for (_, before), (now, after) in pairwise(sizes) if after < before]
    assert rises == [130]
    assert falls == [740]  # ten minutes after the last moment that more was wanted


@given(st.lists(st.integers(0, 9), min_size=2, max_size=60))
def test_a_change_is_one_that_the_whole_window_agrees_on(asked: list[int]) -> None:
    stabilizer, size = Stabilizer(up_after_s=3, down_after_s=5), 4
    for now, count in enumerate(asked):
        stabilizer.observe(float(now), count)
        before, size = size, stabilizer.size(size)
        window = asked[max(0, now - (3 if size > before else 5)) : now + 1]
        assert size >= before or size == max(window)
        assert size <= before or size == min(window)


class FakeGroup:
    def __init__(self, machines: int) -> None:
        self.machines = machines

    async def size(self) -> int:
        return self.machines

    async def resize(self, machines: int) -> None:
        self.machines = machines


def scaler_of(text: str, sites: list[Site], groups: dict[str, Any], now: list[float], path: Path) -> Scaler:
    file = path / "scaling.toml"
    file.write_text(text)
    return Scaler(lambda: sites, read_plan(file), groups, lambda: now[0])


PLAN = '[pool.eu]\ncloud = "aws"\ngroup = "mico-eu"\nregion = "eu-central-1"\nfewest = 1\nmost = 6\n'


def test_a_busy_pool_grows_and_the_metric_says_so(tmp_path: Path) -> None:
    sites, group, now = [site("a", 10, pending_tokens=30_000.0)], FakeGroup(1), [0.0]
    scaler = scaler_of(PLAN, sites, {"eu": group}, now, tmp_path)
    asyncio.run(scaler.reconcile())
    assert group.machines == 1
    now[0] = 31.0
    asyncio.run(scaler.reconcile())
    assert group.machines == 6
    samples = {s.name: s.value for metric in scaler.collect() for s in metric.samples}
    assert samples == {"mico_pool_desired_machines": 6.0, "mico_pool_machines": 1.0}


def test_two_replicas_agree_or_wait(tmp_path: Path) -> None:
    sites, group, now = [site("a", 10, pending_tokens=30_000.0)], FakeGroup(1), [0.0]
    first = scaler_of(PLAN, sites, {"eu": group}, now, tmp_path)
    asyncio.run(first.reconcile())
    now[0] = 20.0
    second = scaler_of(PLAN, sites, {"eu": group}, now, tmp_path)
    sizes = []
    for at_s in range(30, 120, 10):
        now[0] = float(at_s)
        asyncio.run(first.reconcile())
        asyncio.run(second.reconcile())
        sizes.append(group.machines)
    assert sizes == [6] * len(sizes)


def test_a_replica_that_no_machine_reaches_does_not_take_them_from_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its links broken, it saw an idle pool: it made it smaller as often as the other made it larger."""
    sites, group, now = [site(name, 10) for name in "abc"], FakeGroup(4), [0.0]
    seeing = scaler_of(PLAN, sites, {"eu": group}, now, tmp_path)
    lost = [replace(each, state=SiteState.DOWN) for each in sites]
    blind = scaler_of(PLAN, lost, {"eu": group}, now, tmp_path)
    sizes = set()
    for at_s in range(0, 2000, 10):
        now[0] = float(at_s)
        for each in (seeing, blind):
            asyncio.run(each.reconcile())
            sizes.add(group.machines)
    assert sizes == {4, 5}
    assert blind.pools() == [Pool("eu", 0, 5)]
    assert caplog.text.count("pool eu keeps its size: none of its 5 machines is linked here") == 1
    lost[:] = [site("a", 1)]
    found = {}
    for at_s in range(2000, 3000, 10):
        now[0] = float(at_s)
        asyncio.run(blind.reconcile())
        found[at_s] = group.machines
    assert found[2590] == 5  # what it saw of the load before was nothing
    assert found[2990] == 1


def test_a_replica_that_few_machines_reach_counts_the_others_as_busy(tmp_path: Path) -> None:
    sites, group, now = [site("a", 5), site("b", 5)], FakeGroup(6), [0.0]
    scaler = scaler_of(PLAN, sites, {"eu": group}, now, tmp_path)
    for at_s in range(0, 3000, 10):
        now[0] = float(at_s)
        sites[:] = [site(name, 30 // group.machines) for name in "ab"]  # all share the load
        asyncio.run(scaler.reconcile())
    assert group.machines == 5  # 30 slots in use are 4.3 machines of work


def test_a_pool_that_still_starts_machines_grows_by_what_is_known_alone(tmp_path: Path) -> None:
    sites, group, now = [site("a", 10)], FakeGroup(3), [0.0]
    scaler = scaler_of(PLAN, sites, {"eu": group}, now, tmp_path)
    for at_s in range(0, 2000, 10):
        now[0] = float(at_s)
        asyncio.run(scaler.reconcile())
    assert group.machines == 3


@given(
    st.lists(st.tuples(st.integers(1, 8), st.integers(0, 8), st.floats(0.0, 1.5)), min_size=1, max_size=4),
    st.floats(0.0, 60.0),
)
def test_an_incomplete_view_keeps_what_a_complete_one_might_need(
    pools: list[tuple[int, int, float]], budget: float
) -> None:
    linked = {str(k): seen for k, (seen, _, _) in enumerate(pools)}
    sizes = {str(k): seen + others for k, (seen, others, _) in enumerate(pools)}
    busy = {str(k): seen * each for k, (seen, _, each) in enumerate(pools)}
    bounds = {name: Bounds(0, 16, 2.0) for name in linked}
    needed = needed_machines(busy, linked, sizes, bounds)
    raw = desired_machines(busy, bounds)
    for name, size in sizes.items():
        alike = desired_machines({name: busy[name] * size / linked[name]}, {name: bounds[name]})[name]
        assert min(size, alike) <= needed[name] if raw[name] < size else raw[name] == needed[name]
        assert needed[name] <= max(raw[name], size)
    paid = needed_machines(busy, linked, sizes, bounds, budget)
    assert sum(paid.values()) * 2.0 <= budget + 1e-6


def test_a_cloud_that_refuses_holds_up_nobody_else(tmp_path: Path) -> None:
    class Refusing(FakeGroup):
        async def size(self) -> int:
            raise GroupFailed("not allowed")

    sites, now = [site("a", 10), site("b", 9, pool="us")], [0.0]
    scaler = scaler_of(PLAN, sites, {"eu": Refusing(1)}, now, tmp_path)
    asyncio.run(scaler.reconcile())
    assert scaler.desired == {"us": 1}
    assert scaler.pools() == [Pool("us", scaler.machines["us"], 1)]


def test_a_cloud_that_hangs_holds_up_nobody_else_and_is_asked_once(tmp_path: Path) -> None:
    class Hanging(FakeGroup):
        asked = 0

        async def size(self) -> int:
            self.asked += 1
            await asyncio.Event().wait()
            raise AssertionError

    async def scenario() -> None:
        sites, now = [site("a", 10), site("b", 10, pending_tokens=30_000.0, pool="us")], [0.0]
        hanging, other = Hanging(1), FakeGroup(1)
        plan = "every_s = 0.01\n" + PLAN + PLAN.replace("pool.eu", "pool.us")
        scaler = scaler_of(plan, sites, {"eu": hanging, "us": other}, now, tmp_path)
        async with asyncio.timeout(60):
            for now[0] in (0.0, 31.0):
                await scaler.reconcile()
        assert other.machines == 6
        assert hanging.asked == 1

    asyncio.run(scenario())


def test_what_was_wanted_while_a_cloud_refused_counts_afterwards(tmp_path: Path) -> None:
    class Refusing(FakeGroup):
        refuses = False

        async def size(self) -> int:
            if self.refuses:
                raise GroupFailed("not now")
            return self.machines

    sites, group, now = [site("a", 10), site("b", 10)], Refusing(3), [0.0]
    scaler = scaler_of(PLAN, sites, {"eu": group}, now, tmp_path)
    for at_s in range(0, 1000, 10):
        now[0], group.refuses = float(at_s), 200 <= at_s < 900
        sites[:] = [site(name, 10 if at_s < 900 else 0) for name in "ab"]
        asyncio.run(scaler.reconcile())
        assert group.machines == 3  # idle for less than ten minutes


def test_an_answer_that_is_none_ends_no_scaling(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Changed(FakeGroup):
        async def size(self) -> int:
            answer: dict[str, int] = {}
            return answer["targetSize"]

    sites, now = [site("a", 10), site("b", 9, pool="us")], [0.0]
    scaler = scaler_of(PLAN, sites, {"eu": Changed(1)}, now, tmp_path)
    asyncio.run(scaler.reconcile())
    assert scaler.desired == {"us": 1}
    assert "pool eu keeps its size" in caplog.text


def test_machines_that_are_gone_are_forgotten(tmp_path: Path) -> None:
    sites, now = [site("a", 10, pool=""), site("b", 9, pool="eu")], [0.0]
    scaler = scaler_of(PLAN, sites, {"eu": FakeGroup(1)}, now, tmp_path)
    asyncio.run(scaler.reconcile())
    assert scaler.desired.keys() == {"a", "eu"}
    sites.clear()
    asyncio.run(scaler.reconcile())
    assert scaler.desired.keys() == scaler.machines.keys() == scaler._stabilizers.keys() == {"eu"}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('[pool.eu]\ncloud = "aws"\ngroup = "g"\nmost = 3\n', "needs region"),
        (PLAN + "fewst = 2\n", "fewst"),
        (PLAN.replace("fewest = 1", "fewest = 9"), "fewest"),
        ("budget_usd_per_hour = -1\n", "budget"),
    ],
)
def test_a_wrong_plan_is_refused_by_name(text: str, complaint: str, tmp_path: Path) -> None:
    file = tmp_path / "scaling.toml"
    file.write_text(text)
    with pytest.raises(ValueError, match=complaint) as caught:
        read_plan(file)
    assert "scaling.toml" in str(caught.value)


@pytest.mark.parametrize(("said", "fewest"), [("", 1), ("fewest = 0\n", 0)])
def test_a_pool_is_emptied_only_where_the_plan_says_so(said: str, fewest: int, tmp_path: Path) -> None:
    """Queries for an empty pool are refused and do not count as its load."""
    file = tmp_path / "scaling.toml"
    file.write_text(PLAN.replace("fewest = 1\n", said))
    bounds = {name: pool.bounds() for name, pool in read_plan(file).pool.items()}
    assert desired_machines({"eu": 0.0}, bounds) == {"eu": fewest}


def test_without_a_plan_the_desired_size_is_shown_and_nothing_is_resized() -> None:
    sites, now = [site("a", 10, pending_tokens=30_000.0)], [0.0]
    scaler = Scaler(lambda: sites, ScalingPlan(), {}, lambda: now[0])
    for now[0] in (0.0, 31.0):
        asyncio.run(scaler.reconcile())
    (pool,) = scaler.pools()
    assert (pool.name, pool.machines) == ("eu", 1)
    assert pool.desired > 1


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "nobody")
    boto3 = pytest.importorskip("boto3")
    moto = pytest.importorskip("moto")
    with moto.mock_aws():
        client = boto3.client("autoscaling", region_name="eu-central-1")
        ec2 = boto3.client("ec2", region_name="eu-central-1")
        image = ec2.describe_images()["Images"][0]["ImageId"]
        client.create_launch_configuration(
            LaunchConfigurationName="engine", ImageId=image, InstanceType="g5.xlarge"
        )
        client.create_auto_scaling_group(
            AutoScalingGroupName="mico-eu",
            LaunchConfigurationName="engine",
            MinSize=0,
            MaxSize=4,
            DesiredCapacity=1,
            AvailabilityZones=["eu-central-1a"],
        )
        yield client


@pytest.mark.slow
def test_an_auto_scaling_group_of_aws(aws: Any) -> None:
    group = AwsGroup("mico-eu", "eu-central-1")
    assert asyncio.run(group.size()) == 1
    asyncio.run(group.resize(3))
    assert asyncio.run(group.size()) == 3
    found = aws.describe_auto_scaling_groups(AutoScalingGroupNames=["mico-eu"])["AutoScalingGroups"][0]
    assert len(found["Instances"]) == 3
    with pytest.raises(GroupFailed, match="there is no"):
        asyncio.run(AwsGroup("another", "eu-central-1").size())


class Cloud:
    """The two requests that a cloud answers: for a token, then for a group with that token."""

    def __init__(self, token_header: tuple[str, str], size_path: tuple[str, ...]) -> None:
        self.asked: list[tuple[str, str, Any]] = []
        self.machines = 2
        self._token_header, self._size_path = token_header, size_path

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if "token" in request.url.path:
            name, value = self._token_header
            assert request.headers[name] == value
            return httpx.Response(200, json={"access_token": "t"})
        if request.headers.get("authorization") != "Bearer t":
            return httpx.Response(401, text="who are you?")
        body = json.loads(request.content) if request.content else None
        self.asked.append((request.method, str(request.url), body))
        if "missing" in request.url.path:
            return httpx.Response(404, text="no such group")
        answer: Any = self.machines
        for name in reversed(self._size_path):
            answer = {name: answer}
        return httpx.Response(200, json=answer)


def test_a_managed_instance_group_of_google() -> None:
    cloud = Cloud(("metadata-flavor", "Google"), ("targetSize",))
    http = httpx.AsyncClient(transport=httpx.MockTransport(cloud))

    async def scenario() -> None:
        group = GcpGroup("project", "europe-west4", "mico-eu", http)
        assert await group.size() == 2
        await group.resize(5)
        with pytest.raises(GroupFailed, match="404 no such group"):
            await GcpGroup("project", "europe-west4", "missing", http).size()

    asyncio.run(scenario())
    url = "https://compute.googleapis.com/compute/v1/projects/project/regions/europe-west4/instanceGroupManagers"
    assert cloud.asked[:2] == [
        ("GET", f"{url}/mico-eu", None),
        ("POST", f"{url}/mico-eu/resize?size=5", None),
    ]


def test_a_scale_set_of_azure() -> None:
    cloud = Cloud(("metadata", "true"), ("sku", "capacity"))
    http = httpx.AsyncClient(transport=httpx.MockTransport(cloud))

    async def scenario() -> None:
        group = AzureGroup("sub", "rg", "mico-eu", http)
        assert await group.size() == 2
        await group.resize(3)

    asyncio.run(scenario())
    assert [(method, body) for method, _, body in cloud.asked] == [
        ("GET", None),
        ("PATCH", {"sku": {"capacity": 3}}),
    ]
    assert cloud.asked[0][1].startswith("https://management.azure.com/subscriptions/sub/resourceGroups/rg/")
