"""Read from a machine's cloud its secrets, at every start, and the notice that it is about to be taken back.

    machine.py secrets FOLDER CLOUD SECRET...   write FOLDER/secrets.env and the files that the secrets hold
    machine.py notice CLOUD                     return when the cloud has announced the machine's end

Standard library only, for the Python 3.10 that every Ubuntu image with cloud-init has.
"""

import hashlib
import hmac
import json
import os
import re
import sys
import time
import urllib.error
import urllib.request
from base64 import b64decode
from collections.abc import Callable
from http.client import HTTPException
from pathlib import Path
from urllib.parse import urlsplit

METADATA = os.environ.get("MACHINE_METADATA", "http://169.254.169.254")
POLL_S = float(os.environ.get("MACHINE_POLL_S", "2"))
GOOGLE = {"Metadata-Flavor": "Google"}
AZURE = {"Metadata": "true"}


def ask(
    url: str, headers: dict[str, str], method: str = "GET", body: bytes | None = None, timeout_s: float = 5
) -> str:
    """The answer's text. Raises urllib.error.HTTPError for any status that is not 2xx."""
    request = urllib.request.Request(url, data=body, headers=headers, method=method)
    with urllib.request.urlopen(request, timeout=timeout_s) as answer:
        return str(answer.read().decode())


def aws_headers() -> dict[str, str]:
    """A session with the metadata service, which refuses requests without one."""
    token = ask(METADATA + "/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "300"}, "PUT")
    return {"X-aws-ec2-metadata-token": token}


def sign(headers: dict[str, str], body: bytes, url: str, *, scope: str, key: str, secret: str) -> str:
    """AWS Signature Version 4 of a POST to a host's root, over all headers; scope is REGION/SERVICE."""
    host, stamp = urlsplit(url).netloc, headers["x-amz-date"]
    signed = {**{name.lower(): value for name, value in headers.items()}, "host": host}
    names = ";".join(sorted(signed))
    lines = ["POST", "/", "", *(f"{name}:{signed[name]}" for name in sorted(signed)), "", names]
    canonical = "\n".join([*lines, hashlib.sha256(body).hexdigest()])
    scope = f"{stamp[:8]}/{scope}/aws4_request"
    text = "\n".join(["AWS4-HMAC-SHA256", stamp, scope, hashlib.sha256(canonical.encode()).hexdigest()])
    derived = b"AWS4" + secret.encode()
    for part in scope.split("/"):
        derived = hmac.new(derived, part.encode(), "sha256").digest()
    signature = hmac.new(derived, text.encode(), "sha256").hexdigest()
    return f"AWS4-HMAC-SHA256 Credential={key}/{scope}, SignedHeaders={names}, Signature={signature}"


def aws_secret(arn: str) -> str:
    """A secret's text from Secrets Manager, with the machine's own role."""
    roles = METADATA + "/latest/meta-data/iam/security-credentials/"
    session = aws_headers()
    role = json.loads(ask(roles + ask(roles, session).split()[0], session))
    region = arn.split(":")[3]
    url = os.environ.get("MACHINE_SECRETS", f"https://secretsmanager.{region}.amazonaws.com/")
    body = json.dumps({"SecretId": arn}).encode()
    headers = {
        "content-type": "application/x-amz-json-1.1",
        "x-amz-date": time.strftime("%Y%m%dT%H%M%SZ", time.gmtime()),
        "x-amz-security-token": role["Token"],
        "x-amz-target": "secretsmanager.GetSecretValue",
    }
    key, secret = role["AccessKeyId"], role["SecretAccessKey"]
    headers["authorization"] = sign(
        headers, body, url, scope=f"{region}/secretsmanager", key=key, secret=secret
    )
    return str(json.loads(ask(url, headers, "POST", body))["SecretString"])


def gcp_secret(name: str) -> str:
    """A secret's newest version from Secret Manager, with the machine's own service account."""
    endpoint = os.environ.get("MACHINE_SECRETS", "https://secretmanager.googleapis.com")
    path = "/computeMetadata/v1/instance/service-accounts/default/token"
    token = json.loads(ask(METADATA + path, GOOGLE))["access_token"]
    answer = ask(f"{endpoint}/v1/{name}/versions/latest:access", {"Authorization": f"Bearer {token}"})
    return b64decode(json.loads(answer)["payload"]["data"]).decode()


def azure_secret(url: str) -> str:
    """A secret's current version from Key Vault, with the machine's own identity."""
    query = "?api-version=2018-02-01&resource=https%3A%2F%2Fvault.azure.net"
    token = json.loads(ask(f"{METADATA}/metadata/identity/oauth2/token{query}", AZURE))["access_token"]
    return str(json.loads(ask(url + "?api-version=7.4", {"Authorization": f"Bearer {token}"}))["value"])


def aws_notice() -> bool:
    """True once EC2 has announced a stop or a termination of this spot machine."""
    try:
        ask(METADATA + "/latest/meta-data/spot/instance-action", aws_headers())
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return False
        raise
    return True


def gcp_notice() -> bool:
    """True once Compute Engine preempts this machine."""
    return ask(METADATA + "/computeMetadata/v1/instance/preempted", GOOGLE).strip() == "TRUE"


def azure_notice() -> bool:
    """True once Azure has scheduled this machine's eviction or termination."""
    path = "/metadata/scheduledevents?api-version=2020-07-01"
    events = json.loads(ask(METADATA + path, AZURE, timeout_s=120))[
        "Events"
    ]  # the first call may take minutes
    name = ask(METADATA + "/metadata/instance/compute/name?api-version=2021-02-01&format=text", AZURE)
    return any(e["EventType"] in ("Preempt", "Terminate") and name in e["Resources"] for e in events)


SECRET = {"aws": aws_secret, "gcp": gcp_secret, "azure": azure_secret}
NOTICE = {"aws": aws_notice, "gcp": gcp_notice, "azure": azure_notice}


def write_secrets(folder: str, cloud: str, names: list[str]) -> bool:
    """One environment file, and a file for every name not in capitals; only their owner reads them.

    True when all are written.
    """
    values: dict[str, str] = {}
    for name in names:
        values.update(json.loads(SECRET[cloud](name)))
    environment = {name: text for name, text in values.items() if re.fullmatch(r"[A-Z][A-Z0-9_]*", name)}
    files = {"secrets.env": "".join(f"{name}={text}\n" for name, text in environment.items())}
    files.update({name: text for name, text in values.items() if name not in environment})
    for name, text in files.items():
        path = Path(folder, Path(name).name)
        path.touch(mode=0o600)
        path.write_text(text)
    return True


def retry(what: str, attempt: Callable[[], bool]) -> None:
    """Return once attempt returns True; a service that refuses or fails is asked again.

    The rights of a fresh identity take minutes to hold. Were the unit to fail meanwhile, systemd would give
    up the units that require it for good, though it starts the failed one itself again.
    """
    while True:
        try:
            if attempt():
                return
        except (OSError, HTTPException, ValueError, KeyError, IndexError) as error:
            sys.stderr.write(f"{what}: {error}\n")
        time.sleep(POLL_S)


if __name__ == "__main__":
    if sys.argv[1] == "secrets":
        retry("secrets", lambda: write_secrets(sys.argv[2], sys.argv[3], sys.argv[4:]))
    else:
        retry("metadata service", NOTICE[sys.argv[2]])
