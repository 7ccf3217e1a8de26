"""The requests that clients_test.py makes with instructor; runs in that client's environment."""

import json
import os
import sys
from typing import Annotated, Any, Literal

import instructor
import openai
from pydantic import BaseModel, ConfigDict, Field


class City(BaseModel):
    model_config = ConfigDict(extra="forbid")
    city: Literal["Oslo", "Rome"]
    days: Annotated[int, Field(ge=1, le=9)]


plain = openai.OpenAI(max_retries=0)
client = instructor.from_openai(plain, mode=instructor.Mode.JSON_SCHEMA)


def wanted(model: str = os.environ["MICO_MODEL"], max_tokens: int = 24) -> dict[str, Any]:
    messages = [{"role": "user", "content": "Hello there"}]
    return {"model": model, "messages": messages, "temperature": 0, "max_tokens": max_tokens}


def cause_of(error: BaseException) -> openai.APIStatusError:
    """instructor wraps what the SDK raises."""
    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, openai.APIStatusError):
        seen = seen.__cause__ or seen.__context__ or next(iter(getattr(seen, "args", ())), None)
        seen = seen if isinstance(seen, BaseException) else None
    assert isinstance(seen, openai.APIStatusError), repr(error)
    return seen


refused = {"status": 0, "message": "it was not refused"}
try:
    client.chat.completions.create(response_model=City, max_retries=0, **wanted("no-such-model"))
except Exception as error:  # noqa: BLE001 - looked into at once
    told = cause_of(error)
    refused = {"status": told.status_code, "message": str(told)}
chunks = plain.chat.completions.create(**wanted(), stream=True)
found = {
    "models": [each.id for each in client.client.models.list()],
    "chat": plain.chat.completions.create(**wanted()).choices[0].message.content,
    "streamed": [text for chunk in chunks if (text := chunk.choices[0].delta.content)],
    "held": client.chat.completions.create(response_model=City, **wanted(max_tokens=200)).model_dump(),
    "refused": refused,
}
sys.stdout.write(json.dumps(found) + "\n")
