"""What the gateway logs of a request and its response."""

from __future__ import annotations

import logging

import pytest

from tests.support.fakes.edge import Edge, chat_body, run


def test_the_sdks_own_headers_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(edge: Edge) -> None:
        sdk = edge.sdk.with_options(organization="org-1", project="proj-1")
        await sdk.chat.completions.create(**chat_body())

    with caplog.at_level(logging.INFO, "gateway"):
        run(scenario)
    (record,) = [record for record in caplog.records if record.name == "gateway.http.exchange"]
    fields = vars(record)["fields"]
    client = fields["client"]
    assert client["openai-organization"] == "org-1"
    assert client["openai-project"] == "proj-1"
    assert "x-stainless-retry-count" in client
    assert fields["status"] == 200
    assert fields["complete"] is True
    assert "mico-secret" not in str(vars(record))


def test_a_head_is_logged_as_complete(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(edge: Edge) -> None:
        assert (await edge.http.head("/v1/models")).status_code == 200

    with caplog.at_level(logging.INFO, "gateway"):
        run(scenario)
    (record,) = [record for record in caplog.records if record.name == "gateway.http.exchange"]
    assert vars(record)["fields"]["complete"] is True
