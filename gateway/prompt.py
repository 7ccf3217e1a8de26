"""The prompt of a query: a chat, a text, token ids, or pooling inputs. Only sites have a tokenizer."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import NamedTuple

import msgspec


class Images(NamedTuple):
    """The content of a message with images: all parts, including texts, as OpenAI's JSON array.

    `tokens`: an estimate. `fetched`: whether the server must fetch an image from a URL.
    """

    content_json: str
    tokens: int
    fetched: bool


class Message(msgspec.Struct, frozen=True):
    """One turn of a chat. `content` is the text only. `tool_calls_json` is OpenAI's JSON array, empty if
    there are no tool calls.
    """

    role: str
    content: str
    name: str = ""
    tool_calls_json: str = ""
    tool_call_id: str = ""
    reasoning: str = ""  # the assistant's reasoning before its content
    images: Images | None = None

    @property
    def chars(self) -> int:
        return len(self.content) + len(self.reasoning) + len(self.tool_calls_json)


class Chat(msgspec.Struct, frozen=True):
    """A chat. `tools_json` is OpenAI's JSON array, empty if no tool may be called. `tool_choice` is auto (or
    empty), required, or named, which requires a call of `tool_name`. `template_kwargs_json`: arguments for
    the chat template as a JSON object, or empty. `reasoning_effort`: empty for the model's default.
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
        """Return the `images` of each message that has images."""
        return tuple([each.images for each in self.messages if each.images is not None])


@dataclass(frozen=True, slots=True)
class Pooling:
    """Inputs to embed, or documents to rank by a query, for which nothing is generated.

    `task`: the feature that the model needs, EMBED or RERANK. `body_json`: the request body for the server,
    without the model. `inputs`: the number of texts to embed or documents to rank. `tokens`: an estimate.
    """

    task: str
    body_json: str
    inputs: int
    tokens: int

    @property
    def result_bytes(self) -> int:
        """Return the maximum size of the results in bytes."""
        return self.inputs * (MAX_VECTOR_BYTES if self.task == EMBED else SCORE_BYTES)


@dataclass(frozen=True, slots=True)
class Pooled:
    """The result of input `index`: its embedding in little-endian float32, or the document's score."""

    index: int
    vector: bytes = b""
    score: float = 0.0


EMBED, RERANK = "embed", "rerank"
MAX_VECTOR_BYTES = 4 * 8_192
"""An embedding of 8,192 dimensions in float32."""
SCORE_BYTES = 64

Prompt = Chat | str | tuple[int, ...] | Pooling

TOKEN_ID_BYTES = 36
"""The memory of a tuple's entry and its integer object."""


def memory_bytes(prompt: Prompt) -> int:
    """Return the bytes of memory of the prompt's texts or ids, at up to four bytes per character. Results of
    pooling, which arrive all at once, count as well.
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
    """Return the least number of characters that a model reads. Chat templates may drop assistant messages,
    and white space around messages.
    """
    if isinstance(prompt, Pooling):
        return 0
    if not isinstance(prompt, Chat):
        return len(prompt)
    return sum(len(each.content.strip()) for each in prompt.messages if each.role != "assistant")
