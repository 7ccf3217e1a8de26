"""The requests that clients_test.py makes with langchain-openai; runs in that client's environment."""

import json
import os
import sys
from typing import Annotated, Literal

import openai
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, ConfigDict, Field


class City(BaseModel):
    model_config = ConfigDict(extra="forbid")
    city: Literal["Oslo", "Rome"]
    days: Annotated[int, Field(ge=1, le=9)]


def client(model: str, max_tokens: int = 24) -> ChatOpenAI:
    return ChatOpenAI(model=model, temperature=0, max_tokens=max_tokens, max_retries=0)


llm = client(os.environ["MICO_MODEL"])
refused = {"status": 0, "message": "it was not refused"}
try:
    client("no-such-model").invoke("Hello there")
except openai.NotFoundError as error:
    refused = {"status": error.status_code, "message": str(error)}
held = client(os.environ["MICO_MODEL"], 200).with_structured_output(City, method="json_schema")
found = {
    "models": [each.id for each in llm.root_client.models.list()],
    "chat": llm.invoke("Hello there").content,
    "streamed": [chunk.content for chunk in llm.stream("Hello there") if chunk.content],
    "held": held.invoke("Where to?").model_dump(),
    "refused": refused,
}
sys.stdout.write(json.dumps(found) + "\n")
