"""A batch through the command line and real processes: answered on every site, recorded once, explained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from openai.types.chat import ChatCompletion

from tests.support.local_federation import LocalFederation, mico, mico_here

pytestmark = pytest.mark.e2e

LINES = 40


def test_a_file_of_queries_becomes_a_file_of_answers(federation: LocalFederation, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    with source.open("w") as file:
        for number in range(LINES):
            body = {
                "model": federation.model,
                "messages": [{"role": "user", "content": f"line {number}"}],
                "max_tokens": 1 + number % 7,
                "temperature": 0,
            }
            line = {"custom_id": f"c{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
            file.write(json.dumps(line) + "\n")
    printed = mico(federation.folder.path, "batch", "run", str(source), "-o", str(target), "--json")
    batch = json.loads(printed)
    assert (batch["status"], batch["output_path"], batch["errors_path"]) == ("completed", str(target), None)

    lines = [json.loads(line) for line in target.read_text().splitlines()]
    assert [line["custom_id"] for line in lines] == [f"c{number}" for number in range(LINES)]
    bodies = [ChatCompletion.model_validate(line["response"]["body"], strict=True) for line in lines]
    for number, body in enumerate(bodies):
        assert body.usage is not None and body.usage.completion_tokens <= 1 + number % 7
    records = federation.recorded_once([line["response"]["request_id"] for line in lines])
    assert {record.usage.status for record in records.values()} == {"answered"}
    assert len({record.usage.site for record in records.values()}) > 1
    tokens = {line["response"]["request_id"]: body.usage for line, body in zip(lines, bodies, strict=True)}
    for query_id, record in records.items():
        counted = tokens[query_id]
        assert counted is not None and record.usage.completion_tokens == counted.completion_tokens
    federation.wait_until_idle()
    seen = json.loads(mico_here(federation.folder.path, "batch", "list", "--json"))
    assert [each["request_counts"]["completed"] for each in seen if each["id"] == batch["id"]] == [LINES]
