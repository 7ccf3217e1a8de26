"""A batch through the command line and real processes: answered on every site, recorded once, explained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from openai.types.chat import ChatCompletion

from gateway.store.queries import ExplainedQuery
from tests.support.local_federation import LocalFederation, eventually, mico, mico_here

pytestmark = pytest.mark.e2e

LINES = 40


def run_batch(federation: LocalFederation, folder: Path) -> tuple[str, dict[str, ExplainedQuery]]:
    """Have every line of a file answered. Return the id of the batch, and the records of its queries."""
    source, target = folder / "in.jsonl", folder / "out.jsonl"
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
    tokens = {line["response"]["request_id"]: body.usage for line, body in zip(lines, bodies, strict=True)}
    for query_id, record in records.items():
        counted = tokens[query_id]
        assert counted is not None and record.usage.completion_tokens == counted.completion_tokens
    return str(batch["id"]), records


def test_a_file_of_queries_becomes_a_file_of_answers(federation: LocalFederation, tmp_path: Path) -> None:
    ids, took_part = list[str](), set[str]()

    def several_took_part() -> bool:
        batch_id, records = run_batch(federation, tmp_path)
        ids.append(batch_id)
        took_part.update(record.usage.site for record in records.values())
        return len(took_part) > 1

    eventually(several_took_part, "lines run at several sites, as soon as reports are not late")
    federation.wait_until_idle()
    seen = json.loads(mico_here(federation.folder.path, "batch", "list", "--json"))
    assert [each["request_counts"]["completed"] for each in seen if each["id"] in ids] == [LINES] * len(ids)
