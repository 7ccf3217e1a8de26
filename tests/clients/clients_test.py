"""Clients that people use, unmodified, each in an environment of its own: `./dev test --clients` makes them.

Every script here does the same five things and prints what it got: models, a chat, the same as a stream, an
answer held to a JSON schema, and a model that does not exist.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.local_federation import LocalFederation, eventually
from tests.support.tiny_model import write_tiny_model

HERE = Path(__file__).parent
ENVIRONMENTS = Path(os.environ.get("MICO_CLIENTS", "/nowhere"))
WITHIN_S = 180.0
SCRIPTS = {
    "openai-node": "ask_openai_node.mjs",
    "langchain-openai": "ask_langchain.py",
    "litellm": "ask_litellm.py",
    "llm": "ask_llm.py",
    "instructor": "ask_instructor.py",
}

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(
        "MICO_CLIENTS" not in os.environ, reason="the clients are not installed: ./dev test --clients"
    ),
]


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("clients")
    started = LocalFederation.start(folder / "mico", write_tiny_model(folder / "tiny"))
    try:
        eventually(lambda: knows_all_sites(started), "a gateway that tells an unknown model from a late site")
        yield started
    finally:
        started.end()


def knows_all_sites(federation: LocalFederation) -> bool:
    """Just after its start a gateway answers 503 to a model that some site may still bring."""
    body = {"model": "no-such-model", "messages": [{"role": "user", "content": "Hello"}]}
    with federation.http() as http:
        return http.post("/v1/chat/completions", json=body).status_code == 404


def runner(client: str) -> list[str]:
    if client == "openai-node":
        return ["node", str(ENVIRONMENTS / "node" / SCRIPTS[client])]
    return [str(ENVIRONMENTS / client / "bin" / "python"), str(HERE / SCRIPTS[client])]


@pytest.mark.parametrize("client", SCRIPTS)
def test_an_unmodified_client_gets_what_it_asks_for(
    client: str, federation: LocalFederation, tmp_path: Path
) -> None:
    if client == "openai-node":  # its modules are looked up from where the script stands
        (ENVIRONMENTS / "node" / SCRIPTS[client]).write_text((HERE / SCRIPTS[client]).read_text())
    settings = {
        "OPENAI_BASE_URL": federation.base_url,
        "OPENAI_API_BASE": federation.base_url,
        "OPENAI_API_KEY": federation.api_key,
        "MICO_MODEL": federation.model,
        "LLM_USER_PATH": str(tmp_path),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    }
    done = subprocess.run(
        runner(client),
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=False,
        cwd=tmp_path,
        env={**os.environ, **settings},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert federation.model in [name.removeprefix("openai/") for name in found["models"]]
    assert found["chat"], "an empty answer proves nothing"
    assert "".join(found["streamed"]) == found["chat"]
    assert len(found["streamed"]) > 1
    assert found["held"]["city"] in {"Oslo", "Rome"}
    assert 1 <= found["held"]["days"] <= 9
    assert found["refused"]["status"] == 404
    assert "no-such-model" in found["refused"]["message"]
