"""compose.yaml and the Kubernetes manifests: valid for their schemas, and for the programs they start."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from gateway.config import load as load_gateway
from site_engine.config_sources import load as load_site

ROOT = Path(__file__).parents[2]
KUBERNETES = ROOT / "infra/kubernetes"
MANIFESTS = [path for path in sorted(KUBERNETES.glob("*.yaml")) if path.name != "kustomization.yaml"]
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICES = COMPOSE["services"]
SECRET = {
    "database-url": "postgresql://mico@postgres/mico",
    "key-pepper": "p" * 40,
    "site-tokens": "t" * 40,
    "token": "t" * 40,
}
VERSIONS = ("1.31", "1.37")
"""Of Kubernetes: an old one that is still in use, and the newest of the schemas."""


def manifests() -> Iterator[dict[str, Any]]:
    for path in MANIFESTS:
        yield from yaml.safe_load_all(path.read_text())


def pods() -> list[dict[str, Any]]:
    return [each["spec"]["template"] for each in manifests() if "template" in each.get("spec", {})]


def containers() -> list[dict[str, Any]]:
    specs = [pod["spec"] for pod in pods()]
    return [each for spec in specs for each in (*spec.get("initContainers", ()), *spec["containers"])]


def value_of(variable: dict[str, Any]) -> str:
    """Return what a container sees, with made-up secrets and names."""
    if "value" in variable:
        return str(variable["value"])
    source = variable["valueFrom"]
    return SECRET[source["secretKeyRef"]["key"]] if "secretKeyRef" in source else "mico-gateway-0"


def assert_settings(environment: dict[str, str], program: str) -> None:
    """Load the settings as the program does; it raises at an unknown name or a wrong value."""
    if program == "gateway":
        load_gateway(None, environment).tokens()
    else:
        load_site(None, environment)


def test_compose_follows_its_specification() -> None:
    pytest.importorskip("check_jsonschema", reason="./dev setup installs the schema of compose files")
    schema = json.loads((files("check_jsonschema") / "builtin_schemas/vendor/compose-spec.json").read_text())
    jsonschema.validate(COMPOSE, schema)


def test_compose_names_files_and_services_that_exist() -> None:
    sources = [mount.split(":")[0] for service in SERVICES.values() for mount in service.get("volumes", ())]
    assert [source for source in sources if source.startswith(".") and not (ROOT / source).exists()] == []
    assert {source for source in sources if not source.startswith(".")} == set(COMPOSE["volumes"])
    builds = [service["build"] for service in SERVICES.values() if "build" in service]
    assert [build for build in builds if not (ROOT / build["dockerfile"]).exists()] == []
    needed = {name for service in SERVICES.values() for name in service.get("depends_on", ())}
    assert needed <= set(SERVICES)


def test_compose_builds_each_image_once() -> None:
    """Two builds of one name at a time may fail at its tag."""
    built = [service["image"] for service in SERVICES.values() if "build" in service]
    assert sorted(built) == ["mico-allinone", "mico-gateway"]


def test_postgres_is_healthy_once_it_listens() -> None:
    """Its image first starts a server without a port, which makes the database and ends."""
    assert "--host" in SERVICES["postgres"]["healthcheck"]["test"]


@pytest.mark.parametrize("name", ["gateway", "site"])
def test_compose_sets_what_the_programs_know(name: str) -> None:
    environment = {
        key: re.sub(r"\$\{(\w+):\?[^}]*\}", "s" * 40, value)
        for key, value in SERVICES[name]["environment"].items()
    }
    assert_settings(environment, name)


def test_compose_opens_ports_to_this_machine_alone_and_holds_no_secret() -> None:
    ports = [port for service in SERVICES.values() for port in service.get("ports", ())]
    assert [port for port in ports if not port.startswith("127.0.0.1:")] == []
    text = (ROOT / "compose.yaml").read_text()
    assert [
        line for line in text.splitlines() if re.search(r"(PASSWORD|SITE_TOKENS?): (?!\"\$\{)", line)
    ] == []
    assert re.search(r"^\.env$", (ROOT / ".gitignore").read_text(), re.M)


def test_no_log_of_a_container_grows_without_end() -> None:
    """A gateway writes half a KB a query, and the engine keeps all of it unless a size is set."""
    assert {name for name, each in SERVICES.items() if "max-size" not in each["logging"]["options"]} == set()


def test_prometheus_scrapes_services_and_reads_the_shipped_rules() -> None:
    config = yaml.safe_load((ROOT / "infra/compose/prometheus.yaml").read_text())
    static = [each for job in config["scrape_configs"] for each in job["static_configs"]]
    targets = [target for each in static for target in each["targets"]]
    assert targets == [f"gateway:{load_gateway(None, {}).own_metrics_port}"]
    assert SERVICES["gateway"]["environment"]["MICO_GATEWAY_METRICS_HOST"] == "0.0.0.0"
    mounted = {mount.split(":")[1] for mount in SERVICES["prometheus"]["volumes"]}
    assert set(config["rule_files"]) <= mounted


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
@pytest.mark.parametrize("version", VERSIONS)
def test_manifests_follow_the_schemas_of_the_api(path: Path, version: str) -> None:
    """The package has the schemas of every version, 100 MB: too much for every checkout."""
    validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    for each in yaml.safe_load_all(path.read_text()):
        validate.validate(each, version, strict=True)


def test_the_kustomization_takes_in_every_manifest() -> None:
    kustomization = yaml.safe_load((KUBERNETES / "kustomization.yaml").read_text())
    assert kustomization["resources"] and set(kustomization["resources"]) == {path.name for path in MANIFESTS}
    used = {container["image"] for container in containers()}
    assert {image["name"] for image in kustomization["images"]} == used
    built = {path.name.partition(".")[0] for path in (ROOT / "infra/images").glob("*.Dockerfile")}
    assert {image.removeprefix("mico-") for image in used} <= built


@pytest.mark.parametrize(
    ("container", "program"), [("gateway", "gateway"), ("site", "site")], ids=["gateway", "site"]
)
def test_pods_set_what_the_programs_know(container: str, program: str) -> None:
    (found,) = (each for each in containers() if each["name"] == container)
    assert_settings({each["name"]: value_of(each) for each in found["env"]}, program)


def test_pods_run_as_nobody_and_end_after_their_drain() -> None:
    for pod in pods():
        assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
        assert pod["spec"]["securityContext"]["runAsUser"] == 10001
        assert pod["spec"]["terminationGracePeriodSeconds"] > load_gateway(None, {}).drain_s
    for container in containers():
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert "memory" in container["resources"]["limits"]


def test_a_gateway_takes_connections_until_its_service_sends_none() -> None:
    """Service and pod hear of the end at once: a gateway that stops listening first refuses clients."""
    (pod,) = (each for each in pods() if each["spec"]["containers"][0]["name"] == "gateway")
    (gateway,) = pod["spec"]["containers"]
    program, pause_s = gateway["lifecycle"]["preStop"]["exec"]["command"]
    assert program == "sleep"
    assert float(pause_s) >= 3
    drain_s = load_gateway(None, {}).drain_s
    assert pod["spec"]["terminationGracePeriodSeconds"] > float(pause_s) + drain_s


def test_an_update_of_sites_needs_no_gpu_beside_theirs() -> None:
    """By default a pod more is started first: where every GPU is in use it waits for ever."""
    rolled = [each for each in manifests() if each["kind"] == "Deployment"]
    assert [each["metadata"]["name"] for each in rolled] == ["mico-site"]
    for each in rolled:
        rolling = {"maxSurge": 0, "maxUnavailable": 1}
        assert each["spec"]["strategy"] == {"type": "RollingUpdate", "rollingUpdate": rolling}


def test_services_select_pods_and_ports_that_exist() -> None:
    labels = [pod["metadata"]["labels"] for pod in pods()]
    ports = {port["name"] for each in containers() for port in each.get("ports", ())}
    for service in (each for each in manifests() if each["kind"] == "Service"):
        assert service["spec"]["selector"] in labels
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports


def test_every_gateway_is_a_peer_and_is_dialled_by_sites() -> None:
    (gateways,) = (each for each in manifests() if each["kind"] == "StatefulSet")
    name, service = gateways["metadata"]["name"], gateways["spec"]["serviceName"]
    every = ",".join(f"{name}-{n}.{service}:8081" for n in range(gateways["spec"]["replicas"]))
    environment = {
        each["name"]: each.get("value") for each in itertools.chain(*(c["env"] for c in containers()))
    }
    assert environment["MICO_GATEWAY_PEERS"] == environment["MICO_SITE_GATEWAYS"] == every


def test_the_page_says_how_each_secret_is_made() -> None:
    page = (ROOT / "docs/deploying.md").read_text()
    references = [
        variable["valueFrom"]["secretKeyRef"]
        for container in containers()
        for variable in container["env"]
        if "secretKeyRef" in variable.get("valueFrom", {})
    ]
    missing = {
        f"--from-literal={each['key']}="
        for each in references
        if f"--from-literal={each['key']}=" not in page
    }
    assert missing == set()
    assert {each["name"] for each in references} == set(re.findall(r"create secret generic (\S+)", page))
