"""Defines what an API format is: how a request is read, and how its answer and errors are encoded.

Each generating endpoint has one format, and all formats build the same queries. `CHAT_COMPLETIONS` and
`COMPLETIONS` are the formats of OpenAI's two completion endpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Protocol

from gateway.domain import AnswerEvent
from gateway.openai.chat_request import read_chat
from gateway.openai.completion_request import read_completion
from gateway.openai.error_body import ErrorResponse
from gateway.openai.fields import Fields
from gateway.openai.frames import DONE, frame
from gateway.openai.logprobs import LogprobLists
from gateway.openai.request import GenerationRequest
from gateway.openai.response_schema import CHAT, TEXT, ResponseHead, ResponseSchema
from gateway.openai.stream_response import ChunkEncoder
from gateway.openai.unary_response import UnaryResponse


class StreamEncoder(Protocol):
    """Encodes the events of one answer as server-sent events."""

    @property
    def complete(self) -> bool:
        """Return whether every choice has a finish reason and the usage was encoded."""

    def encode(self, piece: AnswerEvent) -> bytes:
        """Return the frames of one event, possibly none."""

    def encode_error(self, error: ErrorResponse, request_id: str) -> bytes:
        """Return the last frames of an answer that failed after it had begun."""


class UnaryFormat(Protocol):
    """One API format whose answers are sent whole."""

    @property
    def id_prefix(self) -> str: ...

    def read(self, fields: Fields) -> GenerationRequest:
        """Read the body of a request; problems are collected in `fields.problems`."""

    def logprobs(self) -> LogprobLists:
        """Return a collector of the log probabilities of one choice."""

    def body(
        self, request: GenerationRequest, head: ResponseHead, answer: UnaryResponse
    ) -> bytes | Iterator[bytes]:
        """Return the JSON body of a complete answer, in parts if it may be large."""

    def error_response(self, error: ErrorResponse, request_id: str) -> tuple[int, bytes]:
        """Return the status and the JSON body of an error response."""


class GenerationFormat(UnaryFormat, Protocol):
    """One API format whose answers may also be streamed. `end_frames` are the last frames of each stream."""

    @property
    def end_frames(self) -> bytes: ...

    def encoder(
        self, request: GenerationRequest, head: ResponseHead, prompt_tokens: int
    ) -> StreamEncoder: ...

    def error_frames(self, error: ErrorResponse, request_id: str) -> bytes:
        """Return the frames of an error in a stream that was opened before the answer began."""


@dataclass(frozen=True, slots=True)
class CompletionFormat:
    """The format of one of OpenAI's completion endpoints."""

    schema: ResponseSchema
    read: Callable[[Fields], GenerationRequest]
    end_frames: bytes = DONE

    @property
    def id_prefix(self) -> str:
        return self.schema.id_prefix

    def logprobs(self) -> LogprobLists:
        return LogprobLists(self.schema.logprobs)

    def body(self, request: GenerationRequest, head: ResponseHead, answer: UnaryResponse) -> bytes:
        return answer.body(self.schema, head, request.sampling.logprobs is not None, request.custom_tools)

    def encoder(self, request: GenerationRequest, head: ResponseHead, prompt_tokens: int) -> StreamEncoder:
        return ChunkEncoder(
            self.schema,
            head,
            request.choices,
            request.stream_options,
            prompt_tokens,
            custom_tools=request.custom_tools,
        )

    def error_response(self, error: ErrorResponse, request_id: str) -> tuple[int, bytes]:
        return error.status, error.body()

    def error_frames(self, error: ErrorResponse, request_id: str) -> bytes:
        return frame(error.body())


CHAT_COMPLETIONS: Final = CompletionFormat(CHAT, read_chat)
COMPLETIONS: Final = CompletionFormat(TEXT, read_completion)
