"""The modules and roots of infra/terraform, with no cloud and no registry: the stub provider answers."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from gateway.config import GatewayConfig
from infra.terraform.tests.mutants import Verdict, judge, mutants
from infra.terraform.tests.recover_schemas import types_in_use
from infra.terraform.tests.workspace import SCHEMAS, SOURCE, Workspace, copy_tree, mirror_config
from mico.local.plan import free_port
from site_engine.config import SiteConfig
from tests.support.local_federation import eventually

MODULES = sorted(f"modules/{path.name}" for path in (SOURCE / "modules").iterdir())
ROOTS = sorted(f"roots/{path.name}" for path in (SOURCE / "roots").iterdir() if path.is_dir())
POOLS = [module for module in MODULES if module.startswith("modules/pool-")]
CLOUD_ROOTS = [root for root in ROOTS if root != "roots/local"]
MIRROR = "MICO_TERRAFORM_MIRROR"
SHAPE = ["cloud", "endpoint", "group", "identity", "name", "network", "region", "role"]
DIGEST = "@sha256:" + "0" * 64
SECRETS = (
    "a-token-for-a-test",
    "long-enough-and-never-stored",
    "a-pepper-for-a-test-of-32-characters",
    "a-key-in-pem",
)


@pytest.fixture(scope="session")
def outcomes(workspace: Workspace) -> dict[str, list[subprocess.CompletedProcess[str]]]:
    """Every folder's init, validate and test, two folders at a time."""

    def check(folder: str) -> list[subprocess.CompletedProcess[str]]:
        commands: list[tuple[str, ...]] = [("init", "-backend=false"), ("validate",), ("test",)]
        if folder == "modules/postgres-aws":
            commands.remove(("validate",))  # one with provider aliases is validated where it is called
        if not list((SOURCE / folder).glob("*.tftest.hcl")):
            commands.remove(("test",))
        return [workspace.terraform(folder, *command) for command in commands]

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(MODULES + ROOTS, pool.map(check, MODULES + ROOTS), strict=True))


def test_everything_is_formatted(workspace: Workspace) -> None:
    done = workspace.terraform(".", "fmt", "-check", "-recursive", "-diff", "modules", "roots")
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("folder", MODULES + ROOTS)
def test_a_folder_is_valid_and_its_tests_pass(
    folder: str, outcomes: dict[str, list[subprocess.CompletedProcess[str]]]
) -> None:
    for done in outcomes[folder]:
        assert done.returncode == 0, f"{done.args}\n{done.stdout}{done.stderr}"
        assert "Warning:" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    "folder", sorted({*MODULES, *CLOUD_ROOTS} - {"modules/process", "modules/pool-local"})
)
def test_a_folder_has_tests_of_its_own(folder: str) -> None:
    assert list((SOURCE / folder).glob("*.tftest.hcl"))


@pytest.mark.parametrize("pool", POOLS)
def test_a_pool_keeps_the_contract(pool: str) -> None:
    contract = SOURCE / pool / "contract.tf"
    assert contract.is_symlink()
    assert contract.resolve() == SOURCE / "modules/contract/contract.tf"
    body = re.search(
        r'output "pool" \{\n.*?value = \{\n(.*?)\n  \}', (SOURCE / pool / "main.tf").read_text(), re.S
    )
    assert body is not None
    assert sorted(re.findall(r"^    (\w+) +=", body[1], re.M)) == SHAPE


@pytest.mark.parametrize("root", [root for root in ROOTS if root.startswith("roots/site-")])
def test_the_sites_share_one_interface(root: str) -> None:
    shared = SOURCE / root / "site.tf"
    assert shared.is_symlink()
    assert shared.resolve() == SOURCE / "roots/site.tf"


@pytest.mark.parametrize("pool", POOLS)
def test_a_pool_is_short(pool: str) -> None:
    own = [path for path in (SOURCE / pool).glob("*.tf") if not path.is_symlink()]
    assert sum(len(path.read_text().splitlines()) for path in own) < 200


def test_every_variable_and_output_is_described() -> None:
    for path in SOURCE.rglob("*.tf"):
        for block in re.findall(r'^(?:variable|output) "\w+" \{.*?^\}', path.read_text(), re.M | re.S):
            assert re.search(r'^  description += "[A-Z].+\."$', block, re.M), f"{path.name}: {block}"


def test_the_recorded_schemas_hold_every_type_in_use() -> None:
    known: set[str] = set()
    for path in SCHEMAS:
        (provider,) = json.loads(path.read_text())["provider_schemas"].values()
        known |= {
            *provider["resource_schemas"],
            *(f"data.{name}" for name in provider["data_source_schemas"]),
        }
    assert types_in_use(SOURCE) - {"terraform_data"} == known


def test_every_setting_given_to_the_product_is_one_that_it_has() -> None:
    text = "\n".join(path.read_text() for path in SOURCE.rglob("roots/**/*.tf*"))
    for prefix, config in (("MICO_GATEWAY_", GatewayConfig), ("MICO_SITE_", SiteConfig)):
        given = {name.lower() for name in re.findall(rf"\b{prefix}([A-Z_]+)\b", text)}
        assert given
        assert given <= {field.name for field in fields(config)}


def test_no_rule_opens_a_shell() -> None:
    text = "\n".join(path.read_text() for path in SOURCE.rglob("*.tf"))
    assert not re.search(r"(from_port|to_port|ports?)\s*=.*\b22\b", text)


# ---- a whole life: apply, nothing left to change, no secret in the state, destroy

VARIABLES: dict[str, dict[str, Any]] = {
    "roots/core": {
        "zone_name": "mico.example.com",
        "images": {"a": f"example.com/gateway{DIGEST}", "b": f"example.com/gateway{DIGEST}"},
        "site_tokens": [SECRETS[0]],
        "database_password": SECRETS[1],
        "key_pepper": SECRETS[2],
        "certificate": SECRETS[3],
    },
    **{
        f"roots/site-{cloud}": {
            "image": f"example.com/engine{DIGEST}",
            "gateways": ["a.gateway.mico.example.com:8443"],
            "token": SECRETS[0],
            **more,
        }
        for cloud, more in {
            "aws": {},
            "gcp": {"project": "p", "secrets": {"HF_TOKEN": SECRETS[1]}},
            "azure": {"subscription_id": "s", "ssh_public_key": "ssh-ed25519 AAAA nobody"},
        }.items()
    },
}


@pytest.mark.parametrize("root", CLOUD_ROOTS)
def test_a_root_is_applied_keeps_no_secret_and_is_destroyed(
    root: str, workspace: Workspace, tmp_path: Path
) -> None:
    shutil.copytree(workspace.root, tmp_path / "terraform", symlinks=True)
    own = Workspace(tmp_path / "terraform", workspace.environment)
    state, plan = own.root / root / "terraform.tfstate", tmp_path / "plan"
    (own.root / root / "backend_override.tf").write_text(LOCAL_STATE)
    (own.root / root / "terraform.tfvars.json").write_text(json.dumps(VARIABLES[root]))
    for example in (own.root / root).glob("sites/*.tfvars"):
        shutil.copy(example, own.root / root / "example.auto.tfvars")
    run(own, root, "init", "-reconfigure")
    run(own, root, "plan", f"-out={plan}")
    shown = run(own, root, "show", "-json", str(plan))
    run(own, root, "apply", str(plan))
    for secret in SECRETS:
        assert secret not in shown
        assert secret not in state.read_text()
    run(own, root, "plan", "-detailed-exitcode")  # 2 if anything were left to change
    run(own, root, "destroy", "-auto-approve")
    assert json.loads(state.read_text())["resources"] == []


def run(workspace: Workspace, folder: str, *command: str) -> str:
    done = workspace.terraform(folder, *command)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


# ---- the first boot of a machine


@pytest.fixture(scope="session")
def first_boots(workspace: Workspace) -> dict[str, str]:
    """The user data of a gateway and of an engine."""
    folder = workspace.root / "rendered"
    folder.mkdir()
    (folder / "main.tf").write_text(RENDERED)
    run(workspace, "rendered", "init")
    run(workspace, "rendered", "apply", "-auto-approve")
    outputs = json.loads(run(workspace, "rendered", "output", "-json"))
    return {name: output["value"] for name, output in outputs.items()}


RENDERED = f"""
module "gateway" {{
  source    = "../modules/cloud-init"
  cloud     = "aws"
  container = {{
    image    = "example.com/gateway{DIGEST}"
    args     = ["gateway"]
    prepare  = ["db", "upgrade"]
    files    = {{ "/var/lib/mico/key-pepper" = "key-pepper" }}
    settings = {{ MICO_GATEWAY_NAME = "gateway-a" }}
  }}
  secrets = ["arn:aws:secretsmanager:eu-central-1:111122223333:secret:mico/gateway-abcdef"]
  tls = {{
    api   = {{ port = 443, to = 8080, alpn = "http/1.1" }}
    sites = {{ port = 8443, to = 8081, alpn = "h2" }}
  }}
}}
module "engine" {{
  source    = "../modules/cloud-init"
  cloud     = "gcp"
  container = {{ image = "example.com/engine{DIGEST}", args = ["site"], gpu = true }}
  secrets   = ["projects/p/secrets/mico-site-gcp-eu"]
}}
output "gateway" {{ value = module.gateway.user_data }}
output "engine" {{ value = module.engine.user_data }}
"""
CLOUD_CONFIG = json.loads((SOURCE / "tests/cloud-config.json").read_text())


@pytest.mark.parametrize("role", ["gateway", "engine"])
def test_a_first_boot_is_valid_cloud_config(role: str, first_boots: dict[str, str]) -> None:
    text = first_boots[role]
    assert text.startswith("#cloud-config\n")
    jsonschema.validate(yaml.safe_load(text), CLOUD_CONFIG)
    assert len(text.encode()) < 16384  # what EC2 takes


def test_a_misspelt_key_of_a_first_boot_is_noticed(first_boots: dict[str, str]) -> None:
    for right, wrong in (
        ("write_files", "write_filez"),
        ("permissions", "permisions"),
        ("runcmd", "run_cmd"),
    ):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(yaml.safe_load(first_boots["gateway"].replace(right, wrong)), CLOUD_CONFIG)


@pytest.mark.parametrize("role", ["gateway", "engine"])
def test_the_units_of_a_first_boot_are_valid(role: str, first_boots: dict[str, str], tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not on the PATH: the units of a first boot are not checked here")
    units = {Path(path).name: text for path, text in files(first_boots[role]).items() if "/systemd/" in path}
    for name, text in {**units, "docker.service": DOCKER}.items():
        local = re.sub(
            r"/usr/(s?bin)/(docker|haproxy)", "/bin/true", text
        )  # programs that only the machine has
        (tmp_path / name).write_text(local)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *(str(tmp_path / name) for name in units)],
        env={**os.environ, "SYSTEMD_UNIT_PATH": f"{tmp_path}:"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_stop_drains_within_the_shortest_notice(first_boots: dict[str, str]) -> None:
    unit = files(first_boots["engine"])["/etc/systemd/system/mico.service"]
    assert "ExecStop=/usr/bin/docker stop --time 25 mico\n" in unit
    assert "TimeoutStopSec=29\n" in unit


def test_a_gateway_that_restarts_keeps_its_machine(first_boots: dict[str, str]) -> None:
    """It answers no check while it drains and starts; its journal would go with the machine."""
    unit = files(first_boots["gateway"])["/etc/systemd/system/mico.service"]
    balancer = (SOURCE / "modules/pool-aws/balancer.tf").read_text()
    stop_s, pause_s = (number(name, unit) for name in ("TimeoutStopSec", "RestartSec"))
    interval_s, checks = (number(name, balancer) for name in ("interval", "unhealthy_threshold"))
    assert stop_s + pause_s + START_S < interval_s * (checks - 1)


def number(name: str, text: str) -> int:
    found = re.search(rf"\b{name} *= *(\d+)", text)
    assert found is not None
    return int(found[1])


def test_triton_may_add_kernels_to_those_of_the_image(first_boots: dict[str, str]) -> None:
    """Those of another GPU or model are compiled at the first start, and the rest of the image is read-only.

    A named volume, since Docker fills it with what the image holds there and keeps it from start to start.
    """
    image = (SOURCE.parent / "images/engine.Dockerfile").read_text()
    cache = re.search(r"^ENV .*TRITON_CACHE_DIR=(\S+)", image, re.M)
    unit = files(first_boots["engine"])["/etc/systemd/system/mico.service"]
    assert cache is not None
    assert re.search(rf"^ExecStart=.* --read-only .* --volume \w+:{cache[1]} ", unit, re.M)


def test_only_a_gateway_ends_tls_and_changes_its_schema_first(first_boots: dict[str, str]) -> None:
    gateway, engine = files(first_boots["gateway"]), files(first_boots["engine"])
    assert (
        "bind :8443 ssl crt /run/mico/tls.pem alpn h2\n  server mico 127.0.0.1:8081\n"
        in gateway["/etc/mico/tls.cfg"]
    )
    assert re.search(r"^ExecStartPre=.* db upgrade$", gateway["/etc/systemd/system/mico.service"], re.M)
    assert not any("tls" in path for path in engine)


@pytest.fixture
def tls_proxy(first_boots: dict[str, str], tmp_path: Path) -> list[str]:
    """The command that runs a gateway's TLS proxy, with a certificate made for the test."""
    proxy, openssl = shutil.which("haproxy", path=f"{os.environ['PATH']}:/usr/sbin"), shutil.which("openssl")
    if proxy is None or openssl is None:
        pytest.skip(
            "haproxy or openssl is missing: the configuration of a gateway's TLS proxy is not checked here"
        )
    for what in (["genpkey", "-algorithm", "RSA"], ["req", "-x509", "-key", "key", "-subj", "/CN=api"]):
        name = "key" if what[0] == "genpkey" else "certificate"
        subprocess.run([openssl, *what, "-out", name], cwd=tmp_path, capture_output=True, check=True)
    pem = tmp_path / "tls.pem"
    pem.write_text((tmp_path / "certificate").read_text() + (tmp_path / "key").read_text())
    text = files(first_boots["gateway"])["/etc/mico/tls.cfg"].replace("/run/mico/tls.pem", str(pem))
    (tmp_path / "tls.cfg").write_text(text)
    return [proxy, "-f", str(tmp_path / "tls.cfg")]


def test_the_tls_proxy_takes_its_configuration(tls_proxy: list[str]) -> None:
    done = subprocess.run([*tls_proxy, "-c"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr.lower()


def test_a_connection_is_probed_before_a_balancer_forgets_it(tls_proxy: list[str], tmp_path: Path) -> None:
    """AWS drops what was silent for 350 s, as a client is that waits for a whole answer."""
    api, sites = free_port(), free_port()
    text = (tmp_path / "tls.cfg").read_text()
    text = text.replace("maxconn 20000", "maxconn 20")  # within this machine's limit of open files
    text = text.replace("bind :443 ", f"bind 127.0.0.1:{api} ")
    (tmp_path / "tls.cfg").write_text(text.replace("bind :8443 ", f"bind 127.0.0.1:{sites} "))
    proxy = subprocess.Popen([*tls_proxy, "-db"])
    try:
        client = eventually(lambda: connected(api), "the proxy listens", within_s=30)
        with client:
            own = client.getsockname()[1]
            probe_s = eventually(lambda: probed_in_s(api, own), "the proxy probes", within_s=30)
        assert probe_s < 350
    finally:
        proxy.terminate()
        proxy.wait(30)


def connected(port: int) -> socket.socket | None:
    with contextlib.suppress(ConnectionRefusedError):
        return socket.create_connection(("127.0.0.1", port), timeout=30)
    return None


def probed_in_s(port: int, client: int) -> float | None:
    """Seconds until the kernel asks whether the client is there; None where it will not."""
    for row in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, remote, _, _, timer, *_ = row.split()
        kind, _, when = timer.partition(":")
        if (local[-4:], remote[-4:], kind) == (f"{port:04X}", f"{client:04X}", KEEPALIVE):
            return int(when, 16) / TICKS_A_SECOND
    return None


def files(user_data: str) -> dict[str, str]:
    return {file["path"]: file["content"] for file in yaml.safe_load(user_data)["write_files"]}


DOCKER = "[Service]\nExecStart=/bin/true\n"
START_S = 30  # of `mico db upgrade` and a gateway
KEEPALIVE = "02"
TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")
LOCAL_STATE = 'terraform {\n  backend "local" {}\n}\n'


# ---- do these checks notice anything?


def test_a_spoilt_argument_is_noticed(workspace: Workspace, outcomes: object) -> None:
    """A sample; all of them: python -m bench.studies.mutants."""
    pools = {"pool-aws": "balancer.tf", "pool-gcp": "balancer.tf", "pool-azure": "balancer.tf"}
    unnoticed = []
    for pool, file in pools.items():
        folder = f"modules/{pool}"
        every = list(mutants(file, (SOURCE / folder / file).read_text()))
        for mutant in random.Random(pool).sample(every, 2):
            if judge(workspace, folder, file, mutant) is Verdict.NONE:
                unnoticed.append(f"{pool}/{mutant.label}")
    assert unnoticed == []


# ---- the real provider, where the machine has it


@pytest.mark.parametrize(("folder", "test"), [("modules/pool-aws", "pool"), ("roots/core", "core")])
def test_the_real_aws_provider_agrees(folder: str, test: str, terraform: str, tmp_path: Path) -> None:
    mirror = os.environ.get(MIRROR)
    if not mirror:
        pytest.skip(
            f"{MIRROR} names no folder of provider binaries: AWS is checked by the stub provider only"
        )
    real = copy_tree(tmp_path, {}, mirror_config(mirror))
    run(real, folder, "init", "-backend=false")
    run(real, folder, "test", f"-filter={test}.tftest.hcl")
