"""Dashboard and alerts name only what /metrics exports: each metric, label, state and outcome.

The list in operating.md has all of it.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from gateway.decision import Decision
from gateway.device import DeviceLoad
from gateway.domain import LoadReport, Model, SiteIdentity, SiteState
from gateway.federation.directory import Directory
from gateway.outcome import Attempt, Outcome, Status
from gateway.query.forecasting import ForecastService
from gateway.scaling.plan import ScalingPlan
from gateway.scaling.scaler import Scaler
from gateway.store.recorder import Recorder
from gateway.store.recorder_metrics import RecorderMetrics
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.route_figures import RouteFigures
from predictor.forecast import Forecast
from predictor.histogram import HistogramForecaster
from tests.support.fakes.store import FakeWriter

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "infra" / "grafana"
VALUES = {"state": {str(state) for state in SiteState}, "outcome": {str(status) for status in Status}}
VALUES["type"] = {"prompt", "response"}
SCRAPED = yaml.safe_load((ROOT / "infra/compose/prometheus.yaml").read_text())["scrape_configs"]
VALUES["job"] = {each["job_name"] for each in SCRAPED}


def scaler(directory: Directory) -> Scaler:
    """Return a scaler after one round."""
    found = Scaler(lambda: directory.sites, ScalingPlan(), {}, lambda: 0.0)
    asyncio.run(found.reconcile())
    return found


def page() -> str:
    """Return what /metrics answers after a query was offloaded, failed over and answered."""
    directory = Directory()
    models = {"m": Model("m", "1", 100, 0, "test")}
    directory.join(SiteIdentity("a", "boot", "aws", "r", models, slots=4, kv_capacity_tokens=100), 0.0)
    metrics = Metrics(directory, lambda: 0)
    metrics.register(scaler(directory))
    metrics.register(RecorderMetrics(Recorder(Path("never started"), FakeWriter())))
    metrics.register(forecasts := ForecastService(HistogramForecaster(), HistogramForecaster()))
    metrics.register(RouteFigures())
    ends = ("released", "lost", "finished")
    attempts = tuple(
        Attempt(Decision("q", end, "a", "mico", "why", (), {}, 0.0), end, 5, 9, 0.2) for end in ends
    )
    answered = Outcome(
        "q",
        "r",
        "t",
        "k",
        "m",
        Status.ANSWERED,
        "",
        5,
        9,
        Forecast((0, 19), (1.0,), "test"),
        attempts,
        0.0,
        0.01,
        0.2,
        1.0,
    )
    metrics.observe(answered)
    forecasts.observe(answered)
    device = DeviceLoad("cuda:0", False, 4, 1, 2, 100, 50, 9.5, 3, 0)
    directory.report("a", LoadReport(1, 0.0, devices=(device,)), directory.sites[0].credit)
    return metrics.text().decode()


def exported() -> dict[str, set[str]]:
    """Return every sample's name with its labels."""
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(page()):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def families() -> dict[str, str]:
    """Return the type of every metric by its name in expressions, also of those that have no sample yet."""
    ending = {"counter": "_total"}
    return {
        family.name + ending.get(family.type, ""): family.type
        for family in text_string_to_metric_families(page())
    }


def dashboard() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((FOLDER / "dashboard.json").read_text())
    return loaded


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


EXPRESSIONS = [target["expr"] for panel in dashboard()["panels"] for target in panel["targets"]]
EXPRESSIONS += [rule["expr"] for rule in rules()]


@pytest.mark.parametrize("expression", sorted(set(EXPRESSIONS)))
def test_an_expression_uses_only_what_is_exported(expression: str) -> None:
    known = {**exported(), "up": {"job", "instance"}}  # which Prometheus has of every target
    names = set(re.findall(r"\b(?:mico_\w+|up\b)", expression))
    assert names
    assert names <= set(known), names - set(known)
    labels = {
        label for group in re.findall(r"by \(([^)]*)\)", expression) for label in re.split(r",\s*", group)
    }
    matched = re.findall(r'(\w+)\s*(?:!=|=~|=)\s*"([^"]*)"', expression)
    usable = set.union(*(known[name] for name in names))
    assert labels | {label for label, _ in matched} <= usable
    for label, value in matched:
        assert value in VALUES[label]
    assert expression.count("(") == expression.count(")")


def test_every_metric_is_on_the_dashboard() -> None:
    shown = set(re.findall(r"\bmico_\w+", " ".join(EXPRESSIONS)))
    plotted = {name.removesuffix("_bucket") for name in shown}
    left_out = {"mico_site_tokens_per_second", "mico_site_rtt_seconds", "mico_link_unknown_messages_total"}
    own = {name for name in families() if not name.startswith("gen_ai_")}  # for other tools' dashboards
    of_routes = {name for name in own if name.startswith(("mico_route_", "mico_shadow_"))}  # on our own page
    assert own - plotted <= left_out | of_routes


def test_every_metric_is_in_the_list_for_operators() -> None:
    text = (ROOT / "docs" / "operating.md").read_text().partition("\n## Metrics\n")[2].partition("\n## ")[0]
    assert set(re.findall(r"`((?:mico|gen_ai)_\w+)`", text)) == set(families())


def test_panels_do_not_overlap_and_have_their_own_ids() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) == 23


def test_every_alert_says_what_and_where_to_read_on() -> None:
    text = (ROOT / "docs" / "operating.md").read_text()
    anchors = {
        re.sub(r"[^a-z0-9 -]", "", heading.lower()).strip().replace(" ", "-")
        for heading in re.findall(r"^#+ (.+)$", text, re.M)
    }
    for rule in rules():
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"]
        file, _, anchor = rule["annotations"]["runbook"].partition("#")
        assert file == "docs/operating.md"
        assert anchor in anchors, rule["alert"]


def test_prometheus_fires_the_alerts_as_it_should() -> None:
    """Run Prometheus' own tool over the days in alerts_test.yaml."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("NOT TESTED: what the alerts do. promtool is not on the PATH: apt-get install prometheus")
    done = subprocess.run(
        [promtool, "test", "rules", "alerts_test.yaml"],
        cwd=FOLDER,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
