"""The requests that clients_test.py makes with llm; runs in its environment. llm lists configured models."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import llm
import openai

CITY = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Oslo", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
served = os.environ["MICO_MODEL"]
told = [
    {
        "model_id": name,
        "model_name": name,
        "api_base": os.environ["OPENAI_BASE_URL"],
        "api_key_name": "mico",
        "supports_schema": True,
    }
    for name in (served, "no-such-model")
]
own = Path(os.environ["LLM_USER_PATH"])
(own / "extra-openai-models.yaml").write_text(json.dumps(told))
(own / "keys.json").write_text(json.dumps({"mico": os.environ["OPENAI_API_KEY"]}))


def ask(name: str, **more: Any) -> Any:
    return llm.get_model(name).prompt("Hello there", temperature=0, **{"max_tokens": 24} | more)


refused = {"status": 0, "message": "it was not refused"}
try:
    ask("no-such-model", stream=False).text()
except openai.NotFoundError as error:
    refused = {"status": error.status_code, "message": str(error)}
found = {
    "models": [model.model_id for model in llm.get_models() if model.model_id != "no-such-model"],
    "chat": ask(served, stream=False).text(),
    "streamed": [text for text in ask(served, stream=True) if text],
    "held": json.loads(ask(served, stream=False, schema=CITY, max_tokens=200).text()),
    "refused": refused,
}
sys.stdout.write(json.dumps(found) + "\n")
