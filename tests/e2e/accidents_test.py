"""Accidents around a federation: bad input, clients that vanish, a site that dies. Nothing stays reserved."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import APIError, NotFoundError, OpenAI

from mico.local.processes import MAX_LOG_BYTES, previous_log
from tests.support.local_federation import COMMAND_WITHIN_S, LocalFederation, eventually

pytestmark = pytest.mark.e2e

LONG = "Tell me everything there is to say about rivers, and then about bread. " * 5


def body(federation: LocalFederation, **fields: Any) -> dict[str, Any]:
    """A query that would run to the limit of the context: the model is told to ignore its end token."""
    question = [{"role": "user", "content": LONG}]
    return {"model": federation.model, "messages": question, "temperature": 0, "ignore_eos": True, **fields}


@pytest.fixture(scope="module")
def whole_fleet(federation: LocalFederation) -> None:
    """Wait until the gateway expects no more sites, and refuses for good what none of them can serve."""

    def is_refused() -> bool:
        tools = [{"type": "function", "function": {"name": "f"}}]
        with federation.http() as http:
            asked = body(federation, tools=tools)
            return http.post("/v1/chat/completions", json=asked).status_code == 400

    eventually(is_refused, "the gateway expects no more sites")


def tokens_seen(federation: LocalFederation) -> int:
    sites = federation.sites().values()
    return sum(site["tokens_total"] + site["prompt_tokens_total"] for site in sites)


@pytest.mark.usefixtures("whole_fleet")
@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"messages": []}, 400, "messages"),
        ({"temperature": 3}, 400, "temperature"),
        ({"n": 0}, 400, "n"),
        ({"stream_options": {"include_usage": True}}, 400, "stream_options"),
        ({"max_completion_tokens": 100_000}, 400, "max_completion_tokens"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, 400, "tools"),
    ],
)
def test_bad_input_is_refused_with_its_reason_and_costs_no_token(
    federation: LocalFederation, fields: dict[str, Any], status: int, param: str
) -> None:
    before = tokens_seen(federation)
    with federation.http() as http:
        response = http.post("/v1/chat/completions", json=body(federation, **fields))
    assert_refused(response, status, param)
    assert tokens_seen(federation) == before


def assert_refused(response: httpx.Response, status: int, param: str) -> None:
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (status, param), error
    assert set(error) == {"message", "type", "param", "code"}


def test_a_wrong_key_is_refused(federation: LocalFederation) -> None:
    with federation.http() as http:
        response = http.post(
            "/v1/chat/completions", json=body(federation), headers={"authorization": "Bearer x"}
        )
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"


def test_clients_that_vanish_in_a_stream_free_everything_and_are_recorded(
    federation: LocalFederation,
) -> None:
    ids = []
    with ExitStack() as clients:
        for _ in range(12):
            http = clients.enter_context(federation.http())
            query = body(federation, stream=True)
            stream = clients.enter_context(http.stream("POST", "/v1/chat/completions", json=query))
            assert "data:" in next(stream.iter_text())
            ids.append(stream.headers["x-request-id"])
    federation.wait_until_idle()
    for record in federation.recorded_once(ids).values():
        assert record.usage.status == "cancelled"
        assert record.usage.completion_tokens > 0


@pytest.mark.parametrize("stream", [False, True])
def test_clients_that_vanish_before_the_first_token_free_everything(
    federation: LocalFederation, stream: bool
) -> None:
    ids = [f"vanishes-early-{stream}-{number}" for number in range(5)]
    impatient = httpx.Timeout(60, read=0.01)
    for query_id in ids:
        with federation.http() as http, pytest.raises(httpx.ReadTimeout):
            query, named = body(federation, stream=stream), {"x-request-id": query_id}
            http.post("/v1/chat/completions", json=query, headers=named, timeout=impatient)
    federation.wait_until_idle()
    assert all(len(records) <= 1 for records in federation.recorded(ids).values())


def test_a_site_that_dies_under_load_costs_at_most_the_answers_it_had_begun(
    federation: LocalFederation,
) -> None:
    killed = threading.Event()

    def ask_until_killed() -> list[str]:
        ends = [ask(sdk, federation)]
        while not killed.is_set():
            ends.append(ask(sdk, federation))
        return ends

    with federation.sdk() as sdk, ThreadPoolExecutor(16) as pool:
        asked = [pool.submit(ask_until_killed) for _ in range(16)]
        try:
            victim = eventually(lambda: busiest(federation), "some site has work")
            federation.kill(victim)
            killed.set()
            ended = [end for each in asked for end in each.result()]
            assert set(ended) <= {"length", "upstream_lost"}
            assert ended.count("length") >= 1
            assert ask(sdk, federation) == "length"
        finally:
            killed.set()
            federation.restart_dead()
    federation.wait_until_ready()
    federation.wait_until_idle()
    assert victim in federation.sites()
    site = next(each for each in federation.running.sites if each.name == victim)
    assert previous_log(Path(site.log)).stat().st_size > 0, "what it wrote before it died is kept"


def test_up_says_which_options_it_does_not_apply_to_what_runs(federation: LocalFederation) -> None:
    folder = str(federation.folder.path)
    command = [sys.executable, "-m", "mico", "--folder", folder, "up", "--detach", "--sites", "5"]
    up = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_WITHIN_S, check=True)
    assert "not applied to what runs: --sites\n" in up.stderr
    assert len(federation.running.sites) == 3


def test_a_log_that_grows_long_is_moved_aside_while_its_process_writes_it(
    federation: LocalFederation,
) -> None:
    log = Path(federation.running.gateways[0].log)
    before, earlier = log.read_bytes(), previous_log(log)
    assert before
    os.truncate(log, MAX_LOG_BYTES + 1)  # as after some hours, of zeros
    eventually(lambda: log.stat().st_size <= MAX_LOG_BYTES, "the log is bounded")
    assert earlier.read_bytes().startswith(before)
    with federation.http() as http:
        request_id = http.get("/v1/no-such-thing").headers["x-request-id"]
    eventually(lambda: request_id.encode() in log.read_bytes(), "the gateway writes on")
    assert log.read_bytes()[:1] == b"{"  # without the zeros up to where it had been


def test_a_model_that_nobody_serves_is_not_found(federation: LocalFederation) -> None:
    """A gateway that has just started says 503 with Retry-After, for a site might be on its way: the SDK
    comes again. Of this file the last, so that it seldom has to.
    """
    before = tokens_seen(federation)
    query = body(federation, model="no-such-model")
    extra = {"ignore_eos": query.pop("ignore_eos")}
    with federation.sdk(max_retries=30) as sdk, pytest.raises(NotFoundError) as refusal:
        sdk.chat.completions.create(**query, extra_body=extra)
    assert_refused(refusal.value.response, 404, "model")
    assert tokens_seen(federation) == before


def busiest(federation: LocalFederation) -> str | None:
    """A site with several running requests that have begun to answer."""
    running = {name: site["running"] for name, site in federation.sites().items()}
    most = max(running, key=lambda name: running[name])
    return most if running[most] >= 3 else None


def ask(sdk: OpenAI, federation: LocalFederation) -> str:
    """Return the finish reason of a stream, or the code of the error that it carried."""
    query = body(federation, max_tokens=60)
    extra = {"ignore_eos": query.pop("ignore_eos")}
    finish = ""
    try:
        with sdk.chat.completions.create(**query, extra_body=extra, stream=True) as chunks:
            for chunk in chunks:
                finish = chunk.choices[0].finish_reason or finish
    except APIError as error:
        return str(error.code)
    return finish
