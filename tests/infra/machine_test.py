"""Requests of a machine to its cloud at boot, against stand-ins for the clouds' services on loopback."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

from infra.terraform.tests.workspace import SOURCE

MACHINE = SOURCE / "modules/cloud-init/machine.py"
SECRET = json.dumps({"MICO_SITE_TOKEN": "abc", "tls.pem": "-----BEGIN\nline two\n"})
ARN = "arn:aws:secretsmanager:eu-central-1:111122223333:secret:site-abcdef"
ROLE = {"AccessKeyId": "AKIDEXAMPLE", "SecretAccessKey": "secret", "Token": "session"}
Answers = dict[str, list[tuple[int, str]]]


class Cloud:
    """A metadata service and a secret store: the answers by path, one after the other, the last for ever."""

    def __init__(self, answers: Answers) -> None:
        self.answers = answers
        self.asked: list[tuple[str, dict[str, str], str]] = []

    def answer(self, path: str, headers: dict[str, str], body: str) -> tuple[int, str]:
        self.asked.append((path, headers, body))
        waiting = self.answers.get(path.partition("?")[0], [(404, "")])
        return waiting.pop(0) if len(waiting) > 1 else waiting[0]

    def headers(self, path: str) -> dict[str, str]:
        return next(headers for asked, headers, _ in self.asked if asked.partition("?")[0] == path)


@contextmanager
def served(cloud: Cloud) -> Iterator[str]:
    class Service(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0))).decode()
            status, text = cloud.answer(self.path, {k.lower(): v for k, v in self.headers.items()}, body)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def do_PUT(self) -> None:
            self.do_GET()

        def do_POST(self) -> None:
            self.do_GET()

        def log_message(self, *_: object) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Service) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def machine(url: str, *arguments: str) -> None:
    environment = {
        **os.environ,
        "MACHINE_METADATA": url,
        "MACHINE_SECRETS": url + "/",
        "MACHINE_POLL_S": "0.01",
    }
    done = subprocess.run(
        [sys.executable, str(MACHINE), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def loaded() -> ModuleType:
    spec = spec_from_file_location("machine", MACHINE)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def aws() -> Cloud:
    roles = "/latest/meta-data/iam/security-credentials/"
    return Cloud(
        {
            "/latest/api/token": [(200, "t")],
            roles: [(200, "site-role")],
            roles + "site-role": [(200, json.dumps(ROLE))],
            "/": [(200, json.dumps({"SecretString": SECRET}))],
        }
    )


def gcp() -> Cloud:
    token = "/computeMetadata/v1/instance/service-accounts/default/token"
    data = base64.b64encode(SECRET.encode()).decode()
    return Cloud(
        {
            token: [(200, json.dumps({"access_token": "bearer"}))],
            "/v1/projects/p/secrets/s/versions/latest:access": [
                (200, json.dumps({"payload": {"data": data}}))
            ],
        }
    )


def azure() -> Cloud:
    return Cloud(
        {
            "/metadata/identity/oauth2/token": [(200, json.dumps({"access_token": "bearer"}))],
            "/secrets/site": [(200, json.dumps({"value": SECRET}))],
        }
    )


@pytest.mark.parametrize(("name", "make"), [("aws", aws), ("gcp", gcp), ("azure", azure)])
def test_secrets_become_files_that_only_their_owner_reads(
    name: str, make: type[Cloud], tmp_path: Path
) -> None:
    with served(make()) as url:
        secret = {"aws": ARN, "gcp": "projects/p/secrets/s", "azure": url + "/secrets/site"}[name]
        machine(url, "secrets", str(tmp_path), name, secret)
    assert (tmp_path / "secrets.env").read_text() == "MICO_SITE_TOKEN=abc\n"
    assert (tmp_path / "tls.pem").read_text() == "-----BEGIN\nline two\n"
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}


def test_a_request_to_aws_is_signed_with_the_role_of_the_machine(tmp_path: Path) -> None:
    cloud = aws()
    with served(cloud) as url:
        machine(url, "secrets", str(tmp_path), "aws", ARN)
    sent = cloud.headers("/")
    assert sent["authorization"].startswith("AWS4-HMAC-SHA256 Credential=AKIDEXAMPLE/")
    assert (
        "SignedHeaders=content-type;host;x-amz-date;x-amz-security-token;x-amz-target,"
        in sent["authorization"]
    )
    assert sent["x-amz-security-token"] == "session"
    assert json.loads(cloud.asked[-1][2]) == {"SecretId": ARN}


def test_the_signature_is_the_one_that_aws_publishes() -> None:
    """`post-vanilla` of AWS's own test suite for Signature Version 4."""
    signed = loaded().sign(
        {"x-amz-date": "20150830T123600Z"},
        b"",
        "https://example.amazonaws.com/",
        scope="us-east-1/service",
        key="AKIDEXAMPLE",
        secret="wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY",
    )
    assert signed.endswith("Signature=5da7c1a2acd57cee7505fc6676e4e544621c30862966e37dddb68e92efbe5d6b")


def test_a_secret_cannot_name_a_file_elsewhere(tmp_path: Path) -> None:
    cloud = azure()
    cloud.answers["/secrets/site"] = [(200, json.dumps({"value": json.dumps({"../../up.pem": "x"})}))]
    inner = tmp_path / "inner"
    inner.mkdir()
    with served(cloud) as url:
        machine(url, "secrets", str(inner), "azure", url + "/secrets/site")
    assert sorted(path.name for path in inner.iterdir()) == ["secrets.env", "up.pem"]
    assert list(tmp_path.iterdir()) == [inner]


@pytest.mark.parametrize("name", ["aws", "gcp", "azure"])
def test_a_store_that_refuses_at_first_is_asked_until_it_answers(name: str, tmp_path: Path) -> None:
    """A fresh identity's rights take minutes to hold; a unit that failed meanwhile takes Mico's with it."""
    cloud = {"aws": aws, "gcp": gcp, "azure": azure}[name]()
    store = list(cloud.answers)[-1]
    cloud.answers[store] = [(403, ""), (503, ""), (200, "not JSON"), *cloud.answers[store]]
    with served(cloud) as url:
        secret = {"aws": ARN, "gcp": "projects/p/secrets/s", "azure": url + "/secrets/site"}[name]
        machine(url, "secrets", str(tmp_path), name, secret)
    assert (tmp_path / "secrets.env").read_text() == "MICO_SITE_TOKEN=abc\n"


def events(kind: str, name: str) -> str:
    return json.dumps({"Events": [{"EventType": kind, "Resources": [name]}]})


NOTICES: dict[str, Answers] = {
    "aws": {
        "/latest/api/token": [(200, "t")],
        "/latest/meta-data/spot/instance-action": [(404, ""), (500, ""), (200, '{"action": "terminate"}')],
    },
    "gcp": {"/computeMetadata/v1/instance/preempted": [(200, "FALSE"), (503, ""), (200, "TRUE\n")]},
    "azure": {
        "/metadata/instance/compute/name": [(200, "pool_1")],
        "/metadata/scheduledevents": [
            (200, '{"Events": []}'),
            (200, events("Freeze", "pool_1")),
            (200, events("Preempt", "pool_2")),
            (200, events("Preempt", "pool_1")),
        ],
    },
}


@pytest.mark.parametrize("name", sorted(NOTICES))
def test_a_notice_is_waited_for_through_failures_and_other_machines_notices(name: str) -> None:
    cloud = Cloud({path: list(answers) for path, answers in NOTICES[name].items()})
    with served(cloud) as url:
        machine(url, "notice", name)
    path = max(NOTICES[name], key=lambda each: len(NOTICES[name][each]))
    assert sum(asked.partition("?")[0] == path for asked, _, _ in cloud.asked) == len(NOTICES[name][path])
