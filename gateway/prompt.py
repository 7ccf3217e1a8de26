"""The prompt of a query: a chat, a text, or token ids. The site tokenizes: the gateway has no tokenizer."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import NamedTuple

import msgspec


class Images(NamedTuple):
    """The images of a message: all parts of its content, texts among them, as OpenAI's array in JSON.

    `tokens` is a guess. `fetched`: a server has to fetch one of them from an address.
    """

    content_json: str
    tokens: int
    fetched: bool


class Message(msgspec.Struct, frozen=True):
    """One turn of a chat. `content` is text alone. `tool_calls_json` is OpenAI's array as text, empty when
    there is none.
    """

    role: str
    content: str
    name: str = ""
    tool_calls_json: str = ""
    tool_call_id: str = ""
    reasoning: str = ""  # what the assistant thought before its content
    images: Images | None = None

    @property
    def chars(self) -> int:
        return len(self.content) + len(self.reasoning) + len(self.tool_calls_json)


class Chat(msgspec.Struct, frozen=True):
    """`tools_json` is OpenAI's array as text, empty if no function may be called. `tool_choice` is auto (or
    empty), required, or named: then `tool_name` must be called. `template_kwargs_json`: arguments of the chat
    template as a JSON object, empty if there are none. `reasoning_effort` is empty where the model decides.
    """

    messages: tuple[Message, ...]
    tools_json: str = ""
    tool_choice: str = ""
    tool_name: str = ""
    single_tool_call: bool = False
    template_kwargs_json: str = ""
    reasoning_effort: str = ""

    @property
    def images(self) -> tuple[Images, ...]:
        """Return the images of each message that has some."""
        return tuple([each.images for each in self.messages if each.images is not None])


@dataclass(frozen=True, slots=True)
class Pooling:
    """Inputs to embed, or documents to rank by a query: nothing is generated.

    `task` is the feature of a model that can do it. `body_json` is the request as servers read it, without
    the model. `inputs` is the number of texts to embed or documents to rank; `tokens` is a guess.
    """

    task: str
    body_json: str
    inputs: int
    tokens: int

    @property
    def result_bytes(self) -> int:
        """Return the most memory that the results take."""
        return self.inputs * (MAX_VECTOR_BYTES if self.task == EMBED else SCORE_BYTES)


@dataclass(frozen=True, slots=True)
class Pooled:
    """The result of input `index`: its embedding in float32, little endian, or the score of the document."""

    index: int
    vector: bytes = b""
    score: float = 0.0


EMBED, RERANK = "embed", "rerank"
MAX_VECTOR_BYTES = 4 * 8_192
"""An embedding of 8,192 dimensions in float32."""
SCORE_BYTES = 64

Prompt = Chat | str | tuple[int, ...] | Pooling

TOKEN_ID_BYTES = 36
"""A place in a tuple and an integer of its own."""


def memory_bytes(prompt: Prompt) -> int:
    """Return the memory of the prompt's texts or ids: up to four bytes a character, whatever UTF-8 took.

    Results that come all at once count, too.
    """
    if isinstance(prompt, str):
        return sys.getsizeof(prompt)
    if isinstance(prompt, Pooling):
        return sys.getsizeof(prompt.body_json) + prompt.result_bytes
    if not isinstance(prompt, Chat):
        return TOKEN_ID_BYTES * len(prompt)
    texts = sum(
        sys.getsizeof(each.content) + sys.getsizeof(each.tool_calls_json) + sys.getsizeof(each.reasoning)
        for each in prompt.messages
    )
    texts += sum(sys.getsizeof(each.content_json) for each in prompt.images)
    return texts + sys.getsizeof(prompt.tools_json) + sys.getsizeof(prompt.template_kwargs_json)


def least_chars(prompt: Prompt) -> int:
    """Return the characters that a model reads at least. Chat templates may leave out what the assistant
    said, and white space around a message.
    """
    if isinstance(prompt, Pooling):
        return 0
    if not isinstance(prompt, Chat):
        return len(prompt)
    return sum(len(each.content.strip()) for each in prompt.messages if each.role != "assistant")
