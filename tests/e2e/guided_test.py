"""A schema from the command line to a real site, and tools that its model does not know."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import openai
import pytest

from tests.support.local_federation import LocalFederation, mico

pytestmark = pytest.mark.e2e

CITY = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Oslo", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}


def test_the_command_line_holds_an_answer_to_a_schema(federation: LocalFederation, tmp_path: Path) -> None:
    file = tmp_path / "city.json"
    file.write_text(json.dumps(CITY))
    said = mico(federation.folder.path, "chat", "-q", "Where to?", "--json-schema", str(file))
    jsonschema.validate(json.loads(said), CITY)


def test_the_command_line_refuses_tools_of_a_model_without_them(federation: LocalFederation) -> None:
    tool = {"type": "function", "function": {"name": "now"}}
    with federation.sdk() as sdk, pytest.raises(openai.BadRequestError, match="call functions") as refused:
        sdk.chat.completions.create(
            model=federation.model, messages=[{"role": "user", "content": "Hi"}], tools=[tool]
        )
    assert refused.value.param == "tools"
