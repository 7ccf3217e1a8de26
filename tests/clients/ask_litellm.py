"""The requests that clients_test.py makes with litellm as a library; runs in that client's environment."""

import json
import os
import sys
from typing import Annotated, Any, Literal

import litellm
from pydantic import BaseModel, ConfigDict, Field


class City(BaseModel):
    model_config = ConfigDict(extra="forbid")
    city: Literal["Oslo", "Rome"]
    days: Annotated[int, Field(ge=1, le=9)]


def ask(model: str = os.environ["MICO_MODEL"], **more: Any) -> Any:
    messages = [{"role": "user", "content": "Hello there"}]
    wanted = {"max_tokens": 24, "temperature": 0, "num_retries": 0} | more
    return litellm.completion(model=f"openai/{model}", messages=messages, **wanted)


refused = {"status": 0, "message": "it was not refused"}
try:
    ask("no-such-model")
except litellm.NotFoundError as error:
    refused = {"status": error.status_code, "message": str(error)}
texts = [chunk.choices[0].delta.content for chunk in ask(stream=True)]
found = {
    "models": litellm.get_valid_models(
        check_provider_endpoint=True,
        custom_llm_provider="openai",
        api_key=os.environ["OPENAI_API_KEY"],
        api_base=os.environ["OPENAI_BASE_URL"].removesuffix("/v1"),
    ),
    "chat": ask().choices[0].message.content,
    "streamed": [text for text in texts if text],
    "held": json.loads(ask(max_tokens=200, response_format=City).choices[0].message.content),
    "refused": refused,
}
sys.stdout.write(json.dumps(found) + "\n")
